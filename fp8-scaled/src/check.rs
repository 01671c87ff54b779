//! Checks of arguments that several operations make.

use super::error::{Result, shape};
use super::value::Scaled;

/// Checks that both operands are on one device.
pub(super) fn check_same_device(op: &'static str, a: &Scaled, b: &Scaled) -> Result<()> {
    match a.device().same_device(b.device()) {
        true => Ok(()),
        false => Err(fp8_candle::Error::DeviceMismatch {
            op,
            what: "the second operand",
            expected: a.device().location(),
            got: b.device().location(),
        }
        .into()),
    }
}

/// Checks that a dimension exists.
pub(super) fn check_dim(op: &'static str, x: &Scaled, dim: usize) -> Result<()> {
    match dim < x.rank() {
        true => Ok(()),
        false => misfit(op, x, format!("a dimension {dim}")),
    }
}

/// Checks dimensions to reduce: each exists and is named once.
pub(super) fn check_dims(op: &'static str, x: &Scaled, dims: &[usize]) -> Result<()> {
    let is_new = |(i, dim): (usize, &usize)| !dims[..i].contains(dim);
    match dims.iter().all(|&dim| dim < x.rank()) && dims.iter().enumerate().all(is_new) {
        true => Ok(()),
        false => misfit(op, x, format!("dimensions {dims:?} to reduce, each once")),
    }
}

/// Checks a dimension from which one value is picked: it must have one.
pub(super) fn check_values(op: &'static str, x: &Scaled, dim: usize) -> Result<()> {
    check_dims(op, x, &[dim])?;
    match x.dims()[dim] {
        0 => misfit(op, x, format!("a value along dimension {dim}")),
        _ => Ok(()),
    }
}

/// An operand whose shape does not fit.
pub(super) fn misfit<T>(op: &'static str, x: &Scaled, expected: String) -> Result<T> {
    Err(shape(op, "the operand", expected, x.dims()))
}
