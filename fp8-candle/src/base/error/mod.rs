//! The errors of this crate.

pub(crate) mod conv;
mod misfit;

pub use conv::ConvError;
pub(crate) use misfit::{dtype_error, shape_error};

use candle_core::{DType, DeviceLocation};
use fp8_core::Format;

/// Result of the functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Returns [`Error::Internal`] with a formatted message.
macro_rules! internal {
    ($($arg:tt)*) => {
        return Err($crate::base::error::Error::Internal(format!($($arg)*)))
    };
}
pub(crate) use internal;

/// An error of an FP8 operation.
///
/// Errors of candle are kept as they are ([`Error::Candle`]). Candle's `Result` carries only the message of the other variants,
/// so match on them before converting.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The operation does not support the dtype of a tensor.
    #[error("{op}: unsupported dtype {got:?} of {what}, expected {expected}")]
    DType {
        /// Operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Dtypes that work.
        expected: &'static str,
        /// Dtype found.
        got: DType,
    },
    /// A tensor has the wrong shape for the operation.
    #[error("{op}: shape {got:?} of {what}, expected {expected}")]
    Shape {
        /// Operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Description of the shapes that work.
        expected: String,
        /// Shape found.
        got: Vec<usize>,
    },
    /// A storage does not hold as many values as its shape needs.
    #[error("a storage of {got} values does not make a tensor of shape {shape:?}")]
    Elements {
        /// The shape.
        shape: Vec<usize>,
        /// Values in the storage.
        got: usize,
    },
    /// The last dimension of a linear layer's input is not its `in_features`.
    #[error(
        "linear layer `{path}`: input of shape {shape:?} has {got} features, expected {expected}"
    )]
    InFeatures {
        /// Path of the layer, as in the checkpoint.
        path: String,
        /// `in_features` of the weight.
        expected: usize,
        /// Last dimension of the input.
        got: usize,
        /// Whole shape of the input.
        shape: Vec<usize>,
    },
    /// The sizes do not make a convolution.
    #[error("convolution `{path}`: {source}")]
    Conv {
        /// Path of the layer, as in the checkpoint.
        path: String,
        /// What is wrong with them.
        source: crate::layers::conv::ConvError,
    },
    /// candle has no dtype for the format.
    #[error("{op}: format {got} has no candle dtype, only e4m3 has one")]
    NoDType {
        /// Operation.
        op: &'static str,
        /// Format found.
        got: Format,
    },
    /// A cast that divides was given a quant_scale.
    #[error(
        "{op}: the cast divides by dequant_scales, expected one that multiplies by its quant_scale (Cast::with_division)"
    )]
    Division {
        /// Operation.
        op: &'static str,
    },
    /// No backend for the device.
    #[error("FP8 operations have no backend for device {0:?}")]
    Device(DeviceLocation),
    /// Two tensors of one operation live on different devices.
    #[error("{op}: {what} is on {got:?}, expected {expected:?}")]
    DeviceMismatch {
        /// Operation.
        op: &'static str,
        /// Which argument.
        what: &'static str,
        /// Where the first tensor is.
        expected: DeviceLocation,
        /// Where this one is.
        got: DeviceLocation,
    },
    /// The GPU is too old for the operation.
    #[error(
        "{op} needs {needed}, and {chip} has compute capability {}.{}; `emulate` works on it",
        capability.0, capability.1
    )]
    Chip {
        /// Operation.
        op: &'static str,
        /// What it needs.
        needed: &'static str,
        /// Name of the GPU.
        chip: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// A second thread uses a CUDA device whose stream belongs to the first.
    #[error(
        "{0:?} was opened with the stream of the calling thread (`Device::new_cuda`) and is used by a second one, whose work \
         would race with the first one's: open it with `fp8_candle::device::open_cuda` or `Device::new_cuda_with_stream`"
    )]
    StreamOfAnotherThread(DeviceLocation),
    /// A step cannot be recorded as a CUDA graph.
    #[error("the step cannot be recorded and run again: {0}")]
    NotRecordable(String),
    /// A GPU does not have enough memory left.
    #[error(
        "cannot allocate {bytes} bytes ({what}) on {chip}, {free} bytes are free: {source_text}"
    )]
    DeviceMemory {
        /// Bytes requested.
        bytes: usize,
        /// What they are for.
        what: String,
        /// Bytes that the driver says are free.
        free: usize,
        /// Name of the GPU.
        chip: String,
        /// What the driver said.
        source_text: String,
    },
    /// The host does not have enough memory.
    #[error("{op}: cannot allocate {bytes} bytes: {source}")]
    HostMemory {
        /// Operation.
        op: &'static str,
        /// Bytes requested.
        bytes: usize,
        /// What the allocator said.
        source: std::collections::TryReserveError,
    },
    /// A matrix product that cuBLASLt refused.
    #[error("cuBLASLt {version} has no product for {problem} on {chip}: {status}")]
    Gemm {
        /// Version of the library.
        version: usize,
        /// Sizes, formats, scales and dtypes.
        problem: String,
        /// Name of the GPU.
        chip: String,
        /// What the library said.
        status: String,
    },
    /// The environment variable `FP8_ISA` does not name an instruction set of this processor.
    #[error(transparent)]
    Isa(#[from] fp8_core::IsaError),
    /// The length of an amax history is over the limit.
    #[error("amax_history_len = {got} is not allowed: it must be at most {limit}")]
    HistoryLength {
        /// The length requested.
        got: usize,
        /// The largest length allowed.
        limit: usize,
    },
    /// A static scale was requested from a slot that was never calibrated.
    #[error("`{0}` has no static scale: calibrate the model first")]
    NotCalibrated(String),
    /// Every tensor that calibration saw in a slot was zero.
    #[error(
        "`{0}`: every calibration batch was zero here, so there is no scale: calibrate with batches that reach the layer"
    )]
    ZeroCalibration(String),
    /// A reduction over ranks returned a vector of another length or dtype.
    #[error(
        "the reduction over ranks was sent {sent} f32 amaxes and gave {dtype:?} of shape {got:?}, expected f32 [{sent}]"
    )]
    Reduction {
        /// Amaxes that were sent.
        sent: usize,
        /// Shape that came back.
        got: Vec<usize>,
        /// Dtype that came back.
        dtype: DType,
    },
    /// Ranks reduce different amaxes.
    #[error(
        "all_reduce_max of the amaxes of the model with `{}` ({rows} rows): the ranks disagree: {}; all ranks must train the same models in \
         the same order and abort the same steps",
        first.as_deref().unwrap_or("no rows"), ranks.join("; ")
    )]
    RanksDisagree {
        /// Rows of the table.
        rows: usize,
        /// Name of its first row.
        first: Option<String>,
        /// What each rank has reduced and after how many steps, in the order of ranks; only this rank's if the group does not number them.
        ranks: Vec<String>,
    },
    /// A block of values with one scale lies across parts of a tensor on several ranks.
    #[error(
        "a rank holds {len} rows or columns of a tensor, expected a multiple of the {block} that share a scale"
    )]
    ShardedBlock {
        /// Rows or columns here.
        len: usize,
        /// How many share a scale.
        block: usize,
    },
    /// Saved state has a value that no step can produce.
    #[error("`{tensor}` holds {value:e} at index {index}, expected it to be {expected}")]
    StateValue {
        /// Row and column of the table.
        tensor: String,
        /// Index within that row.
        index: usize,
        /// The value found.
        value: f32,
        /// Values that work.
        expected: &'static str,
    },
    /// An amax from which no static scale can be made.
    #[error("`{slot}`: {source}")]
    Calibration {
        /// Path of the layer and name of the role.
        slot: String,
        /// What is wrong with it.
        source: fp8_core::ScaleError,
    },
    /// A state table does not have the row to restore.
    #[error("a table of {rows} rows has no row {row} to restore")]
    NoRow {
        /// The row.
        row: usize,
        /// Rows of the table.
        rows: usize,
    },
    /// The cells of a step have no cell for a row; they may be older than the row.
    #[error("no cell {row} among {cells} to record an amax in")]
    NoCell {
        /// The row.
        row: usize,
        /// Number of cells.
        cells: usize,
    },
    /// An optimizer was given nothing to update.
    #[error("{op} on a CUDA device: no tensors")]
    NoTensors {
        /// Operation.
        op: &'static str,
    },
    /// An optimizer was not given one gradient (or `None`) per tensor.
    #[error("{op} on a CUDA device: {got} gradients for {expected} tensors")]
    GradientCount {
        /// Operation.
        op: &'static str,
        /// Gradients given.
        got: usize,
        /// Tensors of the optimizer.
        expected: usize,
    },
    /// A call of the CUDA driver failed.
    #[error("{call}: {status}")]
    Driver {
        /// The call.
        call: &'static str,
        /// What the driver said.
        status: String,
    },
    /// An index is not a row of a table.
    #[error("{op}: index {index} at position {position} is not one of {rows} rows")]
    Index {
        /// Operation that failed.
        op: &'static str,
        /// The index.
        index: i64,
        /// Its position in the flattened indexes.
        position: usize,
        /// Number of rows.
        rows: usize,
    },
    /// A target of cross entropy is not a class.
    #[error("{op}: target {target} at position {position} is not one of {classes} classes")]
    Target {
        /// Operation.
        op: &'static str,
        /// The target.
        target: i64,
        /// Its index in the flattened targets.
        position: usize,
        /// Number of classes.
        classes: usize,
    },
    /// A probability outside of `0..1`.
    #[error("{op}: probability {got}, expected at least 0 and below 1")]
    Probability {
        /// Operation.
        op: &'static str,
        /// The rejected number.
        got: f64,
    },
    /// Dropout was asked of an operation for inference.
    #[error("{op}: dropout with probability {got}, expected none: the operation is for inference")]
    Dropout {
        /// Operation.
        op: &'static str,
        /// The probability.
        got: f64,
    },
    /// A parameter was changed between a forward pass and the backward pass, which reads it again.
    #[error(
        "`{op}`: its {what} of shape {shape:?} ({dtype:?}) has changed since the forward pass, but the backward pass needs the values \
         that it had: step the optimizer after all backward passes, or run this forward pass again"
    )]
    ChangedValues {
        /// Path of the layer, or the operation.
        op: String,
        /// Which parameter.
        what: &'static str,
        /// Its shape.
        shape: Vec<usize>,
        /// Its dtype.
        dtype: DType,
    },
    /// A variable was changed between a forward pass and the backward pass that computes it again.
    #[error(
        "the backward pass computes a forward pass again, but its variable of shape {shape:?} ({dtype:?}) has changed since: step \
         the optimizer after all backward passes"
    )]
    RecomputedValues {
        /// Shape of the variable.
        shape: Vec<usize>,
        /// Its dtype.
        dtype: DType,
    },
    /// A forward pass that is computed again uses other variables than at first.
    #[error(
        "a forward pass that is computed again uses {again} variables, at first {first}: one of shape {shape:?} {what}"
    )]
    RecomputedVariables {
        /// Whether only the first run used the variable, or only the second.
        what: &'static str,
        /// Shape of a variable that only one of the runs uses.
        shape: Vec<usize>,
        /// How many there were at first.
        first: usize,
        /// How many there are now.
        again: usize,
    },
    /// A forward pass that is computed again gives another shape than at first.
    #[error("a forward pass that is computed again gives shape {again:?}, at first {first:?}")]
    RecomputedShape {
        /// Shape at first.
        first: Vec<usize>,
        /// Shape now.
        again: Vec<usize>,
    },
    /// An error of your own from a [`crate::cast::state::ReductionGroup`].
    #[error(transparent)]
    Group(Box<dyn std::error::Error + Send + Sync>),
    /// A condition inside this library did not hold. Please report it.
    #[error("{0}")]
    Internal(String),
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}
