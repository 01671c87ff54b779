//! What can be wrong with a configuration.

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

    /// Scales finer than one per tensor come from the tensor itself, and microscaling has a rule of its own.
    #[error("{operand}: {granularity} scaling must be dynamic, got {scaling}")]
    NotDynamic {
        /// The cast at fault.
        operand: Operand,
        /// Its granularity.
        granularity: Granularity,
        /// Its scaling.
        scaling: ScalingType,
    },

    /// The result of a GEMM is cast by its own amax or without a scale.
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

    /// Embeddings, norms and functional operators have no state from which a scale could come.
    #[error(
        "{operand}: operators are cast too (cast_operators), with dynamic, current or unscaled scaling, got {scaling}"
    )]
    OperatorScaling {
        /// The cast at fault.
        operand: Operand,
        /// Its scaling.
        scaling: ScalingType,
    },

    /// A block needs at least one row and one column.
    #[error("{operand}: a block of {rows}x{cols} elements is empty")]
    EmptyBlock {
        /// The cast at fault.
        operand: Operand,
        /// Rows of the block.
        rows: usize,
        /// Columns of the block.
        cols: usize,
    },

    /// Ranks that share weights do not exist yet, so nothing would be gathered.
    #[error(
        "enable_fp8_all_gather (torchao's enable_fsdp_float8_all_gather) is not supported: there are no ranks yet among which weights \
         could be gathered; leave it false"
    )]
    AllGather,

    /// A GEMM runs in FP8 or in high precision, not half and half.
    #[error("GEMM {gemm}: the cast of {disabled} is disabled and that of {enabled} is not")]
    HalfDisabled {
        /// The GEMM at fault.
        gemm: Gemm,
        /// Its operand in high precision.
        disabled: Operand,
        /// Its operand in FP8.
        enabled: Operand,
    },

    /// An operand is cast to the same format in both GEMMs that use it.
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

    /// A GEMM cannot multiply an OCP format with an FNUZ one.
    #[error("GEMM {gemm}: {a} and {b} do not belong to the same pair of formats")]
    MixedFormatPairs {
        /// The GEMM at fault.
        gemm: Gemm,
        /// Format of its first operand.
        a: Format,
        /// Format of its second operand.
        b: Format,
    },

    /// A delayed scaling history must hold at least one amax, and has a place in memory for each tensor that is cast.
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

    /// A pattern names no layer of the model: most likely a typo.
    #[error("`{pattern}` names no layer{}", near_text(near))]
    UnmatchedPattern {
        /// The pattern.
        pattern: String,
        /// Paths of the model that it may have meant.
        near: Vec<String>,
    },

    /// The recipe of the layers that a pattern names is inconsistent.
    #[error("the recipe for the layers `{pattern}`: {source}")]
    LayerRecipe {
        /// The pattern.
        pattern: String,
        /// What is wrong with the recipe.
        source: Box<ConfigError>,
    },

    /// An epsilon that no amax can be compared with.
    #[error("amax_epsilon = {got:e} is not allowed: it must be finite and not negative")]
    AmaxEpsilon {
        /// The epsilon that was given.
        got: f32,
    },

    /// A margin beyond the range where `max * 2^-margin` is of any use.
    #[error("margin = {got} is not allowed: it must be between -{limit} and {limit}")]
    Margin {
        /// The margin that was given.
        got: i32,
        /// The largest magnitude allowed.
        limit: i32,
    },

    /// A reduction that was read from text has a name only.
    #[error(
        "amax_compute `custom:{name}` has no function here: bind it with Recipe::bind_amax_compute"
    )]
    UnboundAmax {
        /// The name of the function.
        name: String,
    },

    /// A function was to be bound to a recipe that asks for another one.
    #[error(
        "the recipe reduces histories by `{wanted}`, there is no use for the function `{given}`"
    )]
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
