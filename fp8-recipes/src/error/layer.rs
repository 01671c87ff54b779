//! Errors of layers and transformer modules.

use crate::config::Operand;
use fp8_candle::Role;

/// Why a layer cannot be built, called or folded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LayerError {
    /// A batch norm cannot be folded into the layer before it.
    #[error("batch norm `{batch_norm}` cannot be folded into layer `{layer}`: {reason}")]
    CannotFold {
        /// Path of the layer.
        layer: String,
        /// Path of the batch norm.
        batch_norm: String,
        /// What prevents it.
        reason: String,
    },
    /// The input of a batch norm in training has too few values for a variance of each channel.
    #[error("{}: {shape:?} has fewer than two values per channel, too few for a variance", layer.as_deref().unwrap_or("batch norm"))]
    NoVariance {
        /// Path of the layer, if known.
        layer: Option<String>,
        /// Shape of the input.
        shape: Vec<usize>,
    },
    /// The axes of a layer that several ranks hold do not fit its tensors or the mesh.
    #[error("`{path}` with {axes}: {problem}")]
    Axes {
        /// Path of the layer, empty if unknown.
        path: String,
        /// The axes, by dimension.
        axes: String,
        /// What does not fit.
        problem: String,
    },
    /// A layer to time has no weight or no input.
    #[error("a layer to time has {what} = 0, expected at least 1")]
    EmptyCase {
        /// Which size.
        what: &'static str,
    },
    /// The projections of an attention do not have the features of its heads.
    #[error(
        "attention with `{path}`: the projections of queries, keys and values give {got:?} features, its heads have {expected:?}"
    )]
    Heads {
        /// Path of the projection of results.
        path: String,
        /// Features that the heads have.
        expected: Vec<usize>,
        /// Features of the projections.
        got: Vec<usize>,
    },
    /// An option of a transformer module or an adapter, or an input of its call, does not fit the module.
    #[error("`{path}`: {what} is {got}, expected {expected}")]
    TransformerOption {
        /// Path of the module, or of one of its layers; empty if unknown.
        path: String,
        /// Which option or input.
        what: &'static str,
        /// Its value.
        got: String,
        /// Values that fit.
        expected: String,
    },
    /// The recipe lets ranks exchange weights as FP8 codes, but this weight is whole.
    #[error(
        "layer `{path}`: enable_fp8_all_gather (torchao's enable_fsdp_float8_all_gather) is on, but its weight does not lie in parts on \
         several ranks; build the model on a `ShardedVarMap`, or leave the option off"
    )]
    NotSharded {
        /// Path of the layer.
        path: String,
    },
    /// A recipe casts a result of a layer of which each rank has parts. Their sum, or the whole tensor, would have other codes.
    #[error(
        "layer `{path}`: the recipe casts {operand}, of which each rank has only a part or a summand: use a recipe that casts operands \
         alone, or prepare this layer with one (PrepareOptions::with_recipe)"
    )]
    ResultInParts {
        /// Path of the layer.
        path: String,
        /// The result.
        operand: Operand,
    },
    /// A weight in parts travels as codes with a delayed scale, but the guard does not reduce amaxes over all ranks that hold its parts, which
    /// would read each other's codes with other scales.
    #[error(
        "layer `{path}`: codes of its weight travel between {ranks} ranks (enable_fp8_all_gather) with a delayed scale, but the guard \
         reduces amaxes over {reducing}, not known to include them: give it their group (Autocast::reduction_group)"
    )]
    UnreducedCodes {
        /// Path of the layer.
        path: String,
        /// Ranks that hold parts of the weight.
        ranks: usize,
        /// Ranks of the guard's reduction group; 1 without one.
        reducing: usize,
    },
    /// A layer has no state for a tensor that the recipe casts.
    #[error("layer `{path}` keeps no state for its {role}")]
    NoRole {
        /// Path of the layer.
        path: String,
        /// The tensor role.
        role: Role,
    },
    /// An operation without a backward pass was applied to a tensor that tracks a gradient.
    #[error(
        "`{op}` has no backward pass: what lies before it would get no gradient. For inference load the model from a file or \
         detach its inputs"
    )]
    NoBackward {
        /// The operation.
        op: &'static str,
    },
    /// A parameter has no name.
    #[error(
        "a tensor of shape {shape:?} has no path: give the export the VarMap that it comes from (ExportOptions::with_vars), \
         name it (nn::NamedTensor, with_path), or put `#[fp8(skip)]` on a field that is not a parameter"
    )]
    Unnamed {
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
}
