//! Activations of data with a scale: results and gradients have the scale of their input.

use crate::base::activation::Curve;
use crate::base::check::{check_dims, check_like};
use crate::base::error::Result;
use crate::base::math::Real;
use crate::device::cpu::elements::{compute_dtype, for_dtype, map_rows, tensor, with_slices};
use crate::ops::gradients;
use candle_core::Tensor;

/// The data of `f(value)`, where the value is `scale * data`, at the same scale.
pub(crate) fn scaled_curve(
    op: &'static str,
    curve: Curve,
    data: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    if !data.device().is_cpu() {
        return Ok(composed(curve, data, scale)?.to_dtype(data.dtype())?);
    }
    crate::base::simd::check()?;
    for_dtype!(op, data.dtype(), T => {
        with_slices([data], |x: [&[T]; 1]| {
            let y = map_rows(x, 1, |_, [x], y| curve.scaled_values(Real::from_f64(scale), x, y));
            tensor(y, data.shape())
        })?
    })
}

/// `grad` times the slope of `f` at the value `scale * data`.
pub(crate) fn scaled_slope(
    op: &'static str,
    curve: Curve,
    data: &Tensor,
    scale: f64,
    grad: &Tensor,
) -> Result<Tensor> {
    check_like(op, "the gradient", grad, data)?;
    check_dims(op, "the gradient", grad, data.dims())?;
    if !data.device().is_cpu() {
        let [dx] = gradients([data], grad, |[data]| composed(curve, data, scale))?;
        return Ok(dx.to_dtype(data.dtype())?);
    }
    crate::base::simd::check()?;
    for_dtype!(op, data.dtype(), T => {
        with_slices([data, grad], |slices: [&[T]; 2]| {
            let dx = map_rows(slices, 1, |_, [x, grad], dx| {
                curve.scaled_gradient(Real::from_f64(scale), x, grad, dx);
            });
            tensor(dx, data.shape())
        })?
    })
}

fn composed(curve: Curve, data: &Tensor, scale: f64) -> Result<Tensor> {
    let value = (data.to_dtype(compute_dtype(data.dtype()))? * scale)?;
    Ok((curve.composed(&value)? / scale)?)
}
