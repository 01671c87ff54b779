//! The sigmoid, which most curves use.

use crate::base::math::Real;

/// 1 / (1 + e^-x) and its derivative, with an exponential that cannot overflow.
#[inline(always)]
pub(super) fn sigmoid_and_slope<R: Real>(x: R) -> (R, R) {
    let e = (-x.abs()).exp();
    let d = R::ONE / (R::ONE + e);
    (if x < R::ZERO { e * d } else { d }, e * d * d)
}

#[inline(always)]
pub(super) fn sigmoid<R: Real>(x: R) -> R {
    sigmoid_and_slope(x).0
}

#[inline(always)]
pub(super) fn sigmoid_slope<R: Real>(x: R) -> R {
    sigmoid_and_slope(x).1
}

/// `x` held to `-limit..limit`; a NaN stays NaN.
#[inline(always)]
pub(super) fn bound<R: Real>(x: R, limit: f64) -> R {
    let limit = R::from_f64(limit);
    let x = if x > limit { limit } else { x };
    if x < -limit { -limit } else { x }
}
