//! The errors of this crate.

use candle_core::DType;
use fp8_core::Format;
use fp8_core::scaled::ScaledError;
use std::path::PathBuf;

/// Result of the functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What can go wrong in scaled arithmetic.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation on tensors or devices failed, or its arguments do not fit: shapes, dtypes, devices.
    #[error(transparent)]
    Fp8(#[from] fp8_candle::Error),
    /// A file cannot be read or written, or has other names, shapes or dtypes than expected. Never [`fp8_files::Error::Candle`] or
    /// [`fp8_files::Error::Fp8`], which become [`Error::Fp8`].
    #[error(transparent)]
    Files(fp8_files::Error),
    /// A number that cannot be a scale, or a zero scale where an operation has no result for it.
    #[error(transparent)]
    Scaled(#[from] ScaledError),
    /// An operation that has no rule for scales.
    #[error(
        "{op} has no rule for the scale of its result: take the value with `to_tensor`, or compose it of operations that have one"
    )]
    NoScaleRule {
        /// Operation.
        op: &'static str,
    },
    /// A tensor of several elements where one is expected.
    #[error("{op}: shape {got:?}, expected a tensor of one element")]
    NotScalar {
        /// Operation.
        op: &'static str,
        /// Shape found.
        got: Vec<usize>,
    },
    /// A second backward pass over a graph whose parts the first one has freed.
    #[error(
        "backward: the graph behind `{op}` was swept before and is gone; sweep it with `backward_retained` to keep it"
    )]
    GraphUsed {
        /// Operation of the first node that is gone.
        op: &'static str,
    },
    /// A value of a parameter that has changed since. Data change in place, and the scale of the value is not that of the new ones.
    #[error(
        "{op}: the scaled parameter `{name}` has changed since the value that is read was taken from it: step the optimizer after all \
         backward passes, and keep a value with `to_tensor`"
    )]
    ChangedParameter {
        /// Operation.
        op: &'static str,
        /// Name of the parameter.
        name: String,
    },
    /// A parameter with FP8 data, to which the small changes of optimizer steps would be lost.
    #[error(
        "the scaled parameter `{name}` would have data in {got}: expected f32, bf16, f16 or f64"
    )]
    Fp8Parameter {
        /// Name of the parameter.
        name: String,
        /// Format of the data.
        got: Format,
    },
    /// A number that cannot be a scale, or that the file format cannot represent.
    #[error("{path}: the scale of `{tensor}` is {value:e}, expected {expected}")]
    DataScale {
        /// The file.
        path: PathBuf,
        /// Name of the scaled tensor.
        tensor: String,
        /// The number.
        value: f32,
        /// The numbers that are accepted.
        expected: &'static str,
    },
    /// Data without a scale or a scale without data, in a file of scaled tensors.
    #[error("{path} has a tensor `{tensor}` but no `{missing}`")]
    ScaledPair {
        /// The file.
        path: PathBuf,
        /// The tensor that is there.
        tensor: String,
        /// The tensor that is missing.
        missing: String,
    },
}

impl From<fp8_files::Error> for Error {
    fn from(error: fp8_files::Error) -> Self {
        match error {
            fp8_files::Error::Candle(error) => error.into(),
            fp8_files::Error::Fp8(error) => Self::Fp8(error),
            other => Self::Files(other),
        }
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Self::Fp8(error.into())
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Fp8(error) => error.into(),
            Error::Files(error) => error.into(),
            other => Self::wrap(other),
        }
    }
}

/// Returns an internal error with a formatted message.
macro_rules! internal {
    ($($arg:tt)*) => {
        return Err(fp8_candle::Error::Internal(format!($($arg)*)).into())
    };
}
pub(crate) use internal;

/// A tensor of the wrong shape.
pub(crate) fn shape(
    op: &'static str,
    what: &'static str,
    expected: impl Into<String>,
    got: &[usize],
) -> Error {
    let (expected, got) = (expected.into(), got.to_vec());
    Error::Fp8(fp8_candle::Error::Shape {
        op,
        what,
        expected,
        got,
    })
}

/// A dtype that an operation does not support.
pub(crate) fn unsupported(
    op: &'static str,
    what: &'static str,
    expected: &'static str,
    got: DType,
) -> Error {
    Error::Fp8(fp8_candle::Error::DType {
        op,
        what,
        expected,
        got,
    })
}

/// A named tensor of the wrong shape.
pub(crate) fn tensor_shape(tensor: &str, got: &[usize], expected: impl Into<String>) -> Error {
    Error::Files(fp8_files::Error::TensorShape {
        tensor: tensor.to_string(),
        got: got.to_vec(),
        expected: expected.into(),
    })
}

/// A named tensor of a dtype that is not accepted.
pub(crate) fn tensor_dtype(tensor: &str, got: &str, expected: impl Into<String>) -> Error {
    Error::Files(fp8_files::Error::TensorDType {
        tensor: tensor.to_string(),
        got: got.into(),
        expected: expected.into(),
    })
}
