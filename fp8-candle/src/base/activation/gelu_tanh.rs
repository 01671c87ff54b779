//! GELU, tanh approximation.

use super::sigmoid::{bound, sigmoid_and_slope};
use crate::base::error::Result;
use crate::base::math::Real;
use candle_core::Tensor;

const SQRT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
const CUBIC: f64 = 0.044_715;

#[inline(always)]
pub(super) fn value<R: Real>(d: R, scale: R) -> R {
    let (sigmoid, _) = sigmoid_of_2u(d * scale);
    d * sigmoid
}

/// The derivative.
#[inline(always)]
pub(super) fn slope<R: Real>(x: R) -> R {
    let (linear, cubic) = (
        R::from_f64(2.0 * SQRT_2_OVER_PI),
        R::from_f64(6.0 * SQRT_2_OVER_PI * CUBIC),
    );
    // The derivative reaches 0 and 1 well within the limits; beyond them it would be Inf * 0.
    let x = bound(x, 32.0);
    let (sigmoid, slope) = sigmoid_of_2u(x);
    let du = (x * x).mul_add(cubic, linear) * x; // x * d(2u)/dx
    slope.mul_add(du, sigmoid)
}

/// sigmoid(2u) and its derivative with respect to 2u.
#[inline(always)]
fn sigmoid_of_2u<R: Real>(x: R) -> (R, R) {
    let (linear, cubic) = (
        R::from_f64(2.0 * SQRT_2_OVER_PI),
        R::from_f64(2.0 * SQRT_2_OVER_PI * CUBIC),
    );
    sigmoid_and_slope((x * x).mul_add(cubic, linear) * x)
}

pub(super) fn composed(x: &Tensor) -> Result<Tensor> {
    let u = ((x.sqr()? * CUBIC)? + 1.0)?
        .mul(x)?
        .affine(SQRT_2_OVER_PI, 0.0)?;
    Ok((x * u.tanh()?.affine(0.5, 0.5)?)?)
}
