//! Errors of optimizers.

use candle_core::{DType, DeviceLocation, Shape};
use fp8_files::names::PatternError;

/// Result of the functions of this module.
pub(crate) type Result<T, E = OptimError> = std::result::Result<T, E>;

/// An error of the optimizer or of a learning rate schedule. Every message names the value at
/// fault.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimError {
    /// An error of the group of ranks.
    #[error(transparent)]
    Ranks(#[from] fp8_ranks::Error),

    /// The ranks of a job have different variables.
    #[error(
        "rank {rank} has other variables than rank 0: it has {}, rank 0 has {}",
        here.as_deref().unwrap_or("no others"),
        there.as_deref().unwrap_or("no others")
    )]
    OtherVariables {
        /// The rank that says so.
        rank: usize,
        /// The first variable that rank 0 lacks, with dtype and shape.
        here: Option<String>,
        /// The first variable of rank 0 that this rank lacks.
        there: Option<String>,
    },

    /// A parameter got more gradients than in the first backward pass, after their sum was sent to the other ranks.
    #[error(
        "`{name}` got a gradient after its sum was sent to the other ranks: the model uses it more often than in the first step; \
         switch off `DataParallelOptions::overlap`"
    )]
    LateGradient {
        /// The variable.
        name: String,
    },

    /// Two variables have the same name, so their states could not be told apart.
    #[error("two variables are named `{name}`")]
    DuplicateName {
        /// The name that occurs twice.
        name: String,
    },

    /// Master weights were requested, and a variable holds integers.
    #[error(
        "variable `{name}` is {dtype:?}: only variables of floating point dtypes have master weights"
    )]
    MasterOfInteger {
        /// The variable.
        name: String,
        /// Its dtype.
        dtype: DType,
    },

    /// Master weights were requested in a dtype whose range does not hold a value of the variable.
    #[error(
        "variable `{name}` holds {value:e} at index {index}, beyond the range of its master weights in {dtype:?}"
    )]
    MasterOverflow {
        /// The variable.
        name: String,
        /// Which element, counted in row-major order.
        index: usize,
        /// Its value.
        value: f64,
        /// The dtype of the master weights.
        dtype: DType,
    },

    /// The pattern of a parameter group is malformed.
    #[error(transparent)]
    Pattern(#[from] PatternError),

    /// The pattern of a parameter group matches no variable of the optimizer.
    #[error("`{pattern}` names no variable{}", hint(.near))]
    NoSuchVariable {
        /// The pattern.
        pattern: String,
        /// Names that are like it.
        near: Vec<String>,
    },

    /// The state was saved with other parameter groups.
    #[error("the optimizer state has the parameter groups {got:?}, expected {expected:?}")]
    StateGroups {
        /// The patterns of the optimizer that was to load it.
        expected: Vec<String>,
        /// The patterns that were saved.
        got: Vec<String>,
    },

    /// A hyperparameter is outside its range.
    #[error("{name} = {value} is not allowed: {allowed}")]
    InvalidHyperparameter {
        /// The field, as spelled in the configuration.
        name: &'static str,
        /// The value given.
        value: f64,
        /// The allowed range.
        allowed: &'static str,
    },

    /// The loaded state lacks a tensor that the optimizer needs.
    #[error("optimizer state has no tensor `{name}`")]
    MissingState {
        /// The tensor that is missing.
        name: String,
    },

    /// The loaded state has a tensor that belongs to no variable of this optimizer.
    #[error("optimizer state has a tensor `{name}` that belongs to no variable here")]
    UnexpectedState {
        /// The tensor that belongs to nothing here.
        name: String,
    },

    /// A loaded tensor does not have the shape of its variable.
    #[error("optimizer state `{name}`: expected shape {expected:?}, got {got:?}")]
    StateShape {
        /// The tensor at fault.
        name: String,
        /// The shape of the variable.
        expected: Shape,
        /// The shape that was loaded.
        got: Shape,
    },

    /// A loaded tensor does not have the dtype of the moments of its variable.
    #[error("optimizer state `{name}`: expected dtype {expected:?}, got {got:?}")]
    StateDtype {
        /// The tensor at fault.
        name: String,
        /// The dtype of the moments (f64 for an f64 variable, else f32) or of the master weights.
        expected: DType,
        /// The dtype that was loaded.
        got: DType,
    },

    /// A loaded tensor holds a number that no step can produce.
    #[error(
        "optimizer state `{name}` holds {value:e} at index {index}, expected it to be {expected}"
    )]
    StateValue {
        /// The tensor at fault.
        name: String,
        /// Which element, counted in row-major order.
        index: usize,
        /// Its value.
        value: f64,
        /// What the numbers of this tensor have to be.
        expected: &'static str,
    },

    /// The loaded step counter is negative.
    #[error("optimizer state `{name}`: a step count cannot be {got}")]
    NegativeStep {
        /// The tensor at fault.
        name: String,
        /// The value that was loaded.
        got: i64,
    },

    /// The state belongs to another optimizer.
    #[error("the optimizer state is that of `{got}`, expected `{expected}`")]
    StateKind {
        /// The optimizer that was to load it.
        expected: String,
        /// The optimizer that saved it.
        got: String,
    },

    /// The hyperparameters of a state do not fit its optimizer.
    #[error("the hyperparameters of the optimizer state `{kind}` are not valid: {reason}")]
    StateHyperparameters {
        /// The optimizer that saved them.
        kind: String,
        /// What does not fit.
        reason: String,
    },

    /// A scaled parameter is on a device on which steps of scaled parameters do not run.
    #[error("scaled parameter `{name}` is on {got:?}: steps of scaled parameters run on the CPU")]
    ScaledDevice {
        /// The parameter.
        name: String,
        /// Where it is.
        got: DeviceLocation,
    },

    /// A scaled parameter has a dtype that cannot be trained.
    #[error("scaled parameter `{name}` is {got:?}, expected F16, BF16 or F32")]
    ScaledDtype {
        /// The parameter.
        name: String,
        /// Its dtype.
        got: DType,
    },

    /// FP8 moments were requested of an optimizer of scaled parameters.
    #[error(
        "moments of scaled parameters have the dtype of their parameter: leave the optimizer's `moments` at f32"
    )]
    ScaledMoments,

    /// Master weights were requested of an optimizer of scaled parameters.
    #[error(
        "scaled parameters have no master weights, {dtype:?} was asked for: their updates are kept by stochastic rounding"
    )]
    ScaledMasters {
        /// The dtype of the master weights.
        dtype: DType,
    },

    /// The limit of steps skipped in a row because of Inf or NaN is reached: `max_skipped_steps` of the configuration.
    #[error(
        "{steps} steps in a row were skipped because gradients are not finite (max_skipped_steps = {limit}){}",
        origin(.first, .variable)
    )]
    TooManySkipped {
        /// How many steps in a row were skipped.
        steps: u64,
        /// The limit.
        limit: u64,
        /// The tensor in whose cast Inf or NaN was first seen since the last clean step, if a cast has seen any.
        first: Option<String>,
        /// A variable that holds Inf or NaN, if one does.
        variable: Option<String>,
    },

    /// An earlier step failed when some variables were updated and others were not. Another step would update the first ones twice.
    #[error(
        "an earlier step failed after it had begun to update variables: load variables and optimizer from a checkpoint"
    )]
    UnfinishedStep,

    /// Gradients were requested before a micro-batch was added.
    #[error("no micro-batch was added since the last step: there are no gradients to take")]
    NothingAccumulated,

    /// The weight of a micro-batch is not a positive, finite number.
    #[error("a micro-batch cannot weigh {weight}: expected a positive finite number")]
    MicroBatchWeight {
        /// The weight given.
        weight: f64,
    },

    /// The ranks have not gathered and scattered the same parameters in the same order, or cast them with other scales: what they have
    /// computed is wrong.
    #[error(
        "rank {rank}: rank {other} has gathered other sharded parameters than rank 0, in another order, or cast them with other scales, \
         so what both computed is wrong; use the same layers on all ranks, and give the guard their group"
    )]
    RanksDiverged {
        /// This rank.
        rank: usize,
        /// The first rank that differs from rank 0.
        other: usize,
    },

    /// Master weights were asked for where each rank has a part of the parameters.
    #[error(
        "sharded parameters are their own masters in f32: leave the optimizer's `masters` unset"
    )]
    ShardedMasters,

    /// FP8 moments were asked for where each rank has a part of the parameters.
    #[error("moments of sharded parameters are f32: leave the optimizer's `moments` unset")]
    ShardedMoments,

    /// Any other error of an optimizer of your own.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),

    /// A gradient is on another device than its variable.
    #[error("gradient of variable `{name}`: expected it on {expected:?}, got it on {got:?}")]
    GradientDevice {
        /// The variable.
        name: String,
        /// Where the variable is.
        expected: DeviceLocation,
        /// Where the gradient is.
        got: DeviceLocation,
    },

    /// A gradient has another shape or dtype than its variable.
    #[error(
        "gradient of variable `{name}`: expected {expected_dtype:?} {expected_shape:?}, got {got_dtype:?} {got_shape:?}"
    )]
    Gradient {
        /// The variable.
        name: String,
        /// Dtype of the variable.
        expected_dtype: DType,
        /// Shape of the variable.
        expected_shape: Shape,
        /// Dtype of the gradient.
        got_dtype: DType,
        /// Shape of the gradient.
        got_shape: Shape,
    },

    /// An error of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),

    /// An error of an FP8 operation. Never [`fp8_candle::Error::Candle`], which becomes [`OptimError::Candle`].
    #[error(transparent)]
    Fp8(fp8_candle::Error),

    /// An error of scaled arithmetic. Never [`fp8_scaled::Error::Fp8`], which becomes [`OptimError::Fp8`] or [`OptimError::Candle`].
    #[error(transparent)]
    Scaled(Box<fp8_scaled::Error>),
}

fn origin(first: &Option<String>, variable: &Option<String>) -> String {
    let cast = |name| format!(": Inf or NaN was first seen in a cast of `{name}`");
    let value = |name| format!("; the variable `{name}` holds Inf or NaN");
    let parts = [first.as_ref().map(cast), variable.as_ref().map(value)];
    parts.into_iter().flatten().collect()
}

fn hint(near: &[String]) -> String {
    match near {
        [] => String::new(),
        near => format!("; did you mean {}?", near.join(", ")),
    }
}

impl From<fp8_candle::Error> for OptimError {
    fn from(error: fp8_candle::Error) -> Self {
        match error {
            fp8_candle::Error::Candle(error) => Self::Candle(error),
            other => Self::Fp8(other),
        }
    }
}

impl From<fp8_scaled::Error> for OptimError {
    fn from(error: fp8_scaled::Error) -> Self {
        match error {
            fp8_scaled::Error::Fp8(error) => error.into(),
            other => Self::Scaled(other.into()),
        }
    }
}

impl From<OptimError> for candle_core::Error {
    fn from(error: OptimError) -> Self {
        match error {
            OptimError::Candle(error) => error,
            OptimError::Fp8(error) => error.into(),
            OptimError::Scaled(error) => (*error).into(),
            other => candle_core::Error::wrap(other),
        }
    }
}
