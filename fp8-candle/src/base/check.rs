//! Checks of arguments.

use crate::base::error::{Error, Result, dtype_error, shape_error};
use candle_core::{DType, Device, Tensor};

/// Checks that `x` is of `dtype`.
pub(crate) fn check_dtype(
    op: &'static str,
    what: &'static str,
    x: &Tensor,
    dtype: DType,
) -> Result<()> {
    match x.dtype() {
        got if got == dtype => Ok(()),
        got => Err(dtype_error(op, what, dtype.as_str(), got)),
    }
}

/// Checks that `x` is f32, bf16, f16 or f64.
pub(crate) fn check_float(op: &'static str, what: &'static str, x: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 | DType::BF16 | DType::F16 | DType::F64 => Ok(()),
        got => Err(float_error(op, what, got)),
    }
}

/// Checks that `x` is f32, bf16 or f16.
pub(crate) fn check_narrow(op: &'static str, what: &'static str, x: &Tensor) -> Result<()> {
    match x.dtype() {
        DType::F32 | DType::BF16 | DType::F16 => Ok(()),
        got => Err(narrow_error(op, what, got)),
    }
}

/// Not f32, bf16, f16 or f64.
pub(crate) fn float_error(op: &'static str, what: &'static str, got: DType) -> Error {
    dtype_error(op, what, "f32, bf16, f16 or f64", got)
}

/// Not f32, bf16 or f16.
pub(crate) fn narrow_error(op: &'static str, what: &'static str, got: DType) -> Error {
    dtype_error(op, what, "f32, bf16 or f16", got)
}

/// Checks that `x` is on `device`.
pub(crate) fn check_device(
    op: &'static str,
    what: &'static str,
    x: &Tensor,
    device: &Device,
) -> Result<()> {
    if x.device().same_device(device) {
        return Ok(());
    }
    Err(Error::DeviceMismatch {
        op,
        what,
        expected: device.location(),
        got: x.device().location(),
    })
}

/// Checks that `x` has the dtype and the device of `like`.
pub(crate) fn check_like(
    op: &'static str,
    what: &'static str,
    x: &Tensor,
    like: &Tensor,
) -> Result<()> {
    check_dtype(op, what, x, like.dtype())?;
    check_device(op, what, x, like.device())
}

/// Checks that `x` has these dimensions.
pub(crate) fn check_dims(
    op: &'static str,
    what: &'static str,
    x: &Tensor,
    dims: &[usize],
) -> Result<()> {
    match x.dims() == dims {
        true => Ok(()),
        false => Err(shape_error(op, what, format!("{dims:?}"), x.dims())),
    }
}

/// Size of the last dimension.
pub(crate) fn last_dim(op: &'static str, what: &'static str, x: &Tensor) -> Result<usize> {
    match x.dims() {
        [.., last] => Ok(*last),
        [] => Err(shape_error(op, what, "at least one dimension", x.dims())),
    }
}
