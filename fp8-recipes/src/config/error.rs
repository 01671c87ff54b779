//! Errors in configurations.

use fp8_core::{Format, Granularity, ParseFormatError, ParseNameError, did_you_mean};
use fp8_files::names::PatternError;

use super::{Gemm, Operand, ScalingType};

/// An error in a configuration. Every message names the value at fault.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// No recipe has this name.
    #[error("unknown recipe `{got}`; valid recipes are {valid}{}", did_you_mean(got, valid.split(", ")))]
    UnknownRecipe {
        /// The name that was given.
        got: String,
        /// The valid names, separated by commas.
        valid: String,
    },

    /// The name of a granularity, a kind of scaling or a pair of formats is unknown.
    #[error(transparent)]
    UnknownName(#[from] ParseNameError),

    /// The name of an 8-bit format is unknown.
    #[error(transparent)]
    UnknownFormat(#[from] ParseFormatError),

    /// Scales finer than one per tensor must come from the tensor itself; microscaling has its own rule.
    #[error("{operand}: {granularity} scaling must be dynamic, got {scaling}")]
    NotDynamic {
        /// The cast at fault.
        operand: Operand,
        /// Its granularity.
        granularity: Granularity,
        /// Its scaling.
        scaling: ScalingType,
    },

    /// The result of a GEMM must be cast with a scale from its own amax or without a scale.
    #[error(
        "{operand}: a result is cast tensorwise, with dynamic, current or unscaled scaling, got {granularity}, {scaling}"
    )]
    ResultCast {
        /// The cast at fault.
        operand: Operand,
        /// Its granularity.
        granularity: Granularity,
        /// Its scaling.
        scaling: ScalingType,
    },

    /// Casts of operators cannot take scales from state, because embeddings, norms and functional operators have none.
    #[error(
        "{operand}: operators are cast too (cast_operators), with dynamic, current or unscaled scaling, got {scaling}"
    )]
    OperatorScaling {
        /// The cast at fault.
        operand: Operand,
        /// Its scaling.
        scaling: ScalingType,
    },

    /// Weights that travel between ranks as codes need scales that are the same on all ranks.
    #[error(
        "{operand}: delayed codes travel between ranks (enable_fp8_all_gather), so all ranks must have one scale, but reduce_amax = false"
    )]
    UnreducedCodes {
        /// The cast of the weight.
        operand: Operand,
    },

    /// A block has no rows or no columns.
    #[error("{operand}: a block of {rows}x{cols} elements is empty")]
    EmptyBlock {
        /// The cast at fault.
        operand: Operand,
        /// Rows of the block.
        rows: usize,
        /// Columns of the block.
        cols: usize,
    },

    /// One operand of a GEMM is in FP8 and the other in high precision.
    #[error("GEMM {gemm}: the cast of {disabled} is disabled and that of {enabled} is not")]
    HalfDisabled {
        /// The GEMM at fault.
        gemm: Gemm,
        /// Its operand in high precision.
        disabled: Operand,
        /// Its operand in FP8.
        enabled: Operand,
    },

    /// An operand is cast to different formats in the two GEMMs that use it.
    #[error(
        "{first_use} is cast to {first} but {second_use} to {second}; \
         an operand has one format in both GEMMs"
    )]
    TwoFormats {
        /// The first use of the operand.
        first_use: Operand,
        /// Its format.
        first: Format,
        /// The second use of the operand.
        second_use: Operand,
        /// Its format.
        second: Format,
    },

    /// A GEMM would multiply an OCP format with an FNUZ one.
    #[error("GEMM {gemm}: {a} and {b} do not belong to the same pair of formats")]
    MixedFormatPairs {
        /// The GEMM at fault.
        gemm: Gemm,
        /// Format of its first operand.
        a: Format,
        /// Format of its second operand.
        b: Format,
    },

    /// An amax history is empty or longer than the limit.
    #[error("amax_history_len = {got} is not allowed: it must be between 1 and {limit}")]
    HistoryLength {
        /// The length that was given.
        got: usize,
        /// The largest length allowed.
        limit: usize,
    },

    /// A pattern of layer paths is malformed.
    #[error(transparent)]
    Pattern(#[from] PatternError),

    /// A pattern matches no layer of the model: most likely a typo.
    #[error("`{pattern}` names no layer{}", near_text(near))]
    UnmatchedPattern {
        /// The pattern.
        pattern: String,
        /// Paths of the model that it may have meant.
        near: Vec<String>,
    },

    /// The recipe for the layers of a pattern is inconsistent.
    #[error("the recipe for the layers `{pattern}`: {source}")]
    LayerRecipe {
        /// The pattern.
        pattern: String,
        /// What is wrong with the recipe.
        source: Box<ConfigError>,
    },

    /// `amax_epsilon` is negative or not finite.
    #[error("amax_epsilon = {got:e} is not allowed: it must be finite and not negative")]
    AmaxEpsilon {
        /// The epsilon that was given.
        got: f32,
    },

    /// A group of kept activations has no features.
    #[error("kept_activations: group_size = {got} is not allowed: a group has at least 1 feature")]
    EmptyGroup {
        /// The size that was given.
        got: usize,
    },

    /// A margin is outside of the accepted range.
    #[error("margin = {got} is not allowed: it must be between -{limit} and {limit}")]
    Margin {
        /// The margin that was given.
        got: i32,
        /// The largest magnitude allowed.
        limit: i32,
    },

    /// A custom reduction was read from text and is not bound to its function.
    #[error(
        "amax_compute `custom:{name}` has no function here: bind it with Recipe::bind_amax_compute"
    )]
    UnboundAmax {
        /// The name of the function.
        name: String,
    },

    /// A function was bound to a recipe that uses another reduction.
    #[error("the recipe reduces histories by `{wanted}`, not by the function `{given}`")]
    OtherAmax {
        /// What the recipe says.
        wanted: String,
        /// Name of the function.
        given: String,
    },
}

fn near_text(near: &[String]) -> String {
    match near {
        [] => String::new(),
        near => format!("; did you mean {}?", near.join(", ")),
    }
}
