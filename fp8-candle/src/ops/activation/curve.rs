//! The functions of activations, and their slopes.
//!
//! A function of data `d` with a scale gives `f(scale * d) / scale`, which are data of the same scale. Plain values have the
//! constant scale 1, and the compiler drops the multiplications.

use super::sigmoid::{bound, sigmoid, sigmoid_slope};
use super::{erf, gelu_tanh};
use crate::base::data::activation::Curve;
use crate::base::error::Result;
use crate::base::math::Real;
use crate::base::simd::simd;
use candle_core::Tensor;

/// Runs `$body` with functions `$value` and `$slope` for each curve.
macro_rules! with_curve {
    ($curve:expr, $R:ident, ($value:ident, $slope:ident) => $body:expr) => {
        match $curve {
            Curve::Gelu => with_curve!(@ $R, $value, $slope, gelu_tanh::value::<$R>, gelu_tanh::slope::<$R>, $body),
            Curve::GeluErf => with_curve!(@ $R, $value, $slope, erf::value::<$R>, erf::slope::<$R>, $body),
            Curve::QuickGelu => with_curve!(@ $R, $value, $slope, quick_gelu::<$R>, quick_gelu_slope::<$R>, $body),
            Curve::Relu => with_curve!(@ $R, $value, $slope, relu::<$R>, step::<$R>, $body),
            Curve::SquaredRelu => with_curve!(@ $R, $value, $slope, squared_relu::<$R>, squared_relu_slope::<$R>, $body),
            Curve::Silu => with_curve!(@ $R, $value, $slope, silu::<$R>, silu_slope::<$R>, $body),
            Curve::Sigmoid => with_curve!(@ $R, $value, $slope, scaled_sigmoid::<$R>, sigmoid_slope::<$R>, $body),
        }
    };
    (@ $R:ident, $value:ident, $slope:ident, $v:expr, $s:expr, $body:expr) => {
        simd(#[inline(always)] || {
            let ($value, $slope) = ($v, $s);
            let _ = (&$value, &$slope);
            $body
        })
    };
}

impl Curve {
    pub(super) fn values<R: Real>(self, x: &[R], y: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for (y, &x) in y.iter_mut().zip(x) {
                *y = value(x, R::ONE);
            }
        });
    }

    pub(super) fn gated<R: Real>(self, gate: &[R], up: &[R], y: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for ((y, &gate), &up) in y.iter_mut().zip(gate).zip(up) {
                *y = value(gate, R::ONE) * up;
            }
        });
    }

    pub(super) fn gradient<R: Real>(self, x: &[R], grad: &[R], dx: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for ((dx, &x), &grad) in dx.iter_mut().zip(x).zip(grad) {
                *dx = grad * slope(x);
            }
        });
    }

    pub(super) fn gated_gradient<R: Real>(
        self,
        gate: &[R],
        up: &[R],
        grad: &[R],
        dgate: &mut [R],
        dup: &mut [R],
    ) {
        with_curve!(self, R, (value, slope) => {
            let inputs = gate.iter().zip(up).zip(grad);
            for ((dgate, dup), ((&gate, &up), &grad)) in dgate.iter_mut().zip(dup).zip(inputs) {
                *dgate = grad * up * slope(gate);
                *dup = grad * value(gate, R::ONE);
            }
        });
    }

    /// `f(scale * d) / scale` of each `d` of `data`, computed without the quotient.
    pub(super) fn scaled_values<R: Real>(self, scale: R, data: &[R], y: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for (y, &d) in y.iter_mut().zip(data) {
                *y = value(d, scale);
            }
        });
    }

    /// `grad` times the slope at `scale * d`.
    pub(super) fn scaled_gradient<R: Real>(self, scale: R, data: &[R], grad: &[R], dx: &mut [R]) {
        with_curve!(self, R, (value, slope) => {
            for ((dx, &d), &grad) in dx.iter_mut().zip(data).zip(grad) {
                *dx = grad * slope(d * scale);
            }
        });
    }

    pub(super) fn composed(self, x: &Tensor) -> Result<Tensor> {
        let sigmoid = |x: &Tensor| -> Result<Tensor> {
            // 1 / (1 + e^-x), by tanh, which candle differentiates and which cannot overflow.
            Ok(((x * 0.5)?.tanh()? * 0.5)?.affine(1., 0.5)?)
        };
        Ok(match self {
            Self::Gelu => gelu_tanh::composed(x)?,
            Self::GeluErf => erf::composed(x)?,
            Self::QuickGelu => (x * sigmoid(&(x * 1.702)?)?)?,
            Self::Relu => x.relu()?,
            Self::SquaredRelu => x.relu()?.sqr()?,
            Self::Silu => (x * sigmoid(x)?)?,
            Self::Sigmoid => sigmoid(x)?,
        })
    }
}

#[inline(always)]
fn silu<R: Real>(d: R, scale: R) -> R {
    d * sigmoid(d * scale)
}

#[inline(always)]
fn silu_slope<R: Real>(x: R) -> R {
    // 1 - sigmoid(x) without cancellation; beyond the limits it would be Inf * 0.
    let bounded = bound(x, 128.);
    sigmoid(x) * bounded.mul_add(sigmoid(-bounded), R::ONE)
}

#[inline(always)]
fn quick_gelu<R: Real>(d: R, scale: R) -> R {
    d * sigmoid(d * scale * R::from_f64(1.702))
}

#[inline(always)]
fn quick_gelu_slope<R: Real>(x: R) -> R {
    silu_slope(x * R::from_f64(1.702))
}

#[inline(always)]
fn relu<R: Real>(x: R, _: R) -> R {
    // NaN stays NaN.
    if x < R::ZERO { R::ZERO } else { x }
}

#[inline(always)]
fn step<R: Real>(x: R) -> R {
    if x > R::ZERO { R::ONE } else { R::ZERO }
}

#[inline(always)]
fn squared_relu<R: Real>(d: R, scale: R) -> R {
    let x = relu(d, scale);
    x * x * scale
}

#[inline(always)]
fn squared_relu_slope<R: Real>(x: R) -> R {
    let x = relu(x, R::ONE);
    x + x
}

/// The sigmoid is the only curve whose values do not grow with its argument.
#[inline(always)]
fn scaled_sigmoid<R: Real>(d: R, scale: R) -> R {
    sigmoid(d * scale) / scale
}
