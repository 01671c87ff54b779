//! Tensors that do not fit an operation.

use super::Error;
use candle_core::DType;

/// [`Error::DType`].
pub(crate) fn dtype_error(
    op: &'static str,
    what: &'static str,
    expected: &'static str,
    got: DType,
) -> Error {
    Error::DType {
        op,
        what,
        expected,
        got,
    }
}

/// [`Error::Shape`].
pub(crate) fn shape_error(
    op: &'static str,
    what: &'static str,
    expected: impl Into<String>,
    got: impl Into<Vec<usize>>,
) -> Error {
    Error::Shape {
        op,
        what,
        expected: expected.into(),
        got: got.into(),
    }
}
