//! GELU, tanh approximation.

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
    let limit = R::from_f64(32.0);
    // The derivative reaches 0 and 1 well within the limits; beyond them it would be Inf * 0.
    let x = if x > limit { limit } else { x };
    let x = if x < -limit { -limit } else { x };
    let (sigmoid, slope) = sigmoid_of_2u(x);
    let du = (x * x).mul_add(cubic, linear) * x; // x * d(2u)/dx
    slope.mul_add(du, sigmoid)
}

/// sigmoid(2u) and its derivative with respect to 2u, with an exponential that cannot overflow.
#[inline(always)]
fn sigmoid_of_2u<R: Real>(x: R) -> (R, R) {
    let (linear, cubic) = (
        R::from_f64(2.0 * SQRT_2_OVER_PI),
        R::from_f64(2.0 * SQRT_2_OVER_PI * CUBIC),
    );
    let v = (x * x).mul_add(cubic, linear) * x;
    let e = (-v.abs()).exp();
    let d = R::ONE / (R::ONE + e);
    (if v < R::ZERO { e * d } else { d }, e * d * d)
}

pub(super) fn composed(x: &Tensor) -> Result<Tensor> {
    let u = ((x.sqr()? * CUBIC)? + 1.0)?
        .mul(x)?
        .affine(SQRT_2_OVER_PI, 0.0)?;
    Ok((x * u.tanh()?.affine(0.5, 0.5)?)?)
}
