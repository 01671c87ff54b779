//! GELU by the error function: `x Phi(x)`, with Phi the distribution of a normal variable.

use crate::base::error::Result;
use crate::base::math::Real;
use candle_core::Tensor;
use std::f64::consts::FRAC_1_SQRT_2;

/// 1 / sqrt(2 pi)
const DENSITY_AT_0: f64 = 0.398_942_280_401_432_7;

#[inline(always)]
pub(super) fn value<R: Real>(d: R, scale: R) -> R {
    d * distribution(d * scale)
}

/// The derivative, `Phi(x) + x Phi'(x)`.
#[inline(always)]
pub(super) fn slope<R: Real>(x: R) -> R {
    let magnitude = bounded(x.abs());
    // Not of an infinite x, which would be Inf * 0.
    let within = if x < R::ZERO { -magnitude } else { magnitude };
    let density = exp_of_half_square(magnitude) * R::from_f64(DENSITY_AT_0);
    within.mul_add(density, distribution(x))
}

/// Phi(x).
#[inline(always)]
fn distribution<R: Real>(x: R) -> R {
    let tail = bounded(x.abs()).by((tail_f32, |x: f64| 0.5 * libm::erfc(x * FRAC_1_SQRT_2)));
    if x < R::ZERO { tail } else { R::ONE - tail }
}

/// Phi(-x) for `0 <= x <= 40`, relatively accurate while the result is a normal number; 0 beyond.
///
/// `t P(t) exp(-x^2 / 2)` with `t = 1 / (1 + 0.26 x)`: P is fitted to the relative error, which stays below 6e-8.
#[inline(always)]
fn tail_f32(x: f32) -> f32 {
    let t = 1.0 / 0.26_f32.mul_add(x, 1.0);
    let p = 0.030_896_22_f32;
    let p = p.mul_add(t, -0.154_740_83);
    let p = p.mul_add(t, 0.255_467_8);
    let p = p.mul_add(t, -0.155_537_22);
    let p = p.mul_add(t, 0.164_153_32);
    let p = p.mul_add(t, 0.049_642_13);
    let p = p.mul_add(t, 0.103_391_424);
    let p = p.mul_add(t, 0.102_964_92);
    let p = p.mul_add(t, 0.103_762_195);
    p * t * exp_of_half_square(x)
}

/// exp(-x^2 / 2) without the error of a rounded square, which grows with the square.
#[inline(always)]
fn exp_of_half_square<R: Real>(x: R) -> R {
    let minus_half = R::from_f64(-0.5);
    let square = x * x;
    let rounded_off = x.mul_add(x, -square);
    (square * minus_half).exp() * rounded_off.mul_add(minus_half, R::ONE)
}

/// Beyond 40 nothing is left of the tail in f64 either; an infinite square would be NaN.
#[inline(always)]
fn bounded<R: Real>(x: R) -> R {
    let limit = R::from_f64(40.);
    if x > limit { limit } else { x }
}

/// Not `Tensor::gelu_erf`, whose gradient has constants with six digits.
pub(super) fn composed(x: &Tensor) -> Result<Tensor> {
    Ok((x * (x * FRAC_1_SQRT_2)?.erf()?.affine(0.5, 0.5)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn phi(x: f64) -> f64 {
        0.5 * libm::erfc(-x * FRAC_1_SQRT_2)
    }

    #[test]
    fn values_are_relatively_accurate_in_the_tail_too() {
        for step in -130_000..=130_000 {
            let x = step as f32 * 1e-4;
            let expected = f64::from(x) * phi(f64::from(x));
            let error = (f64::from(value(x, 1.)) - expected).abs();
            // The fit 5e-8; t 1.2e-7, of which the function takes up to twice as much; the polynomial, the exponential and the
            // correction 1.2e-7 each; three products 6e-8 each.
            assert!(
                error <= 8e-7 * expected.abs(),
                "{x}: {} for {expected}",
                value(x, 1.)
            );
            let error = (value(f64::from(x), 1.) - expected).abs();
            assert!(error <= 1e-15 * expected.abs(), "f64, {x}");
        }
    }

    #[test]
    fn slopes_are_accurate() {
        for step in -130_000..=130_000 {
            let x = f64::from(step) * 1e-4;
            let expected = phi(x) + x * DENSITY_AT_0 * (-0.5 * x * x).exp();
            // Relative to the two terms, which cancel around -0.75.
            let size = phi(x) + (x * DENSITY_AT_0 * (-0.5 * x * x).exp()).abs();
            // The expected square is rounded: up to 85 units of its last place in the exponential.
            assert!(
                (slope(x) - expected).abs() <= 2e-14 * size,
                "{x}: {} for {expected}",
                slope(x)
            );
            let rounded = f64::from(x as f32);
            let expected = phi(rounded) + rounded * DENSITY_AT_0 * (-0.5 * rounded * rounded).exp();
            assert!(
                (f64::from(slope(x as f32)) - expected).abs() <= 8e-7 * size,
                "{x}: {} for {expected}",
                slope(x as f32)
            );
        }
    }

    #[test]
    fn far_out_and_nan() {
        for x in [41f32, 1e19, 3e38, f32::INFINITY] {
            assert_eq!((value(x, 1.), slope(x)), (x, 1.));
            assert_eq!(slope(-x), 0.);
            assert_eq!(slope(f64::from(-x)), 0.);
            assert_eq!(value(f64::from(x), 1.), f64::from(x));
        }
        assert_eq!(value(-3e38f32, 1.), 0.);
        assert!(value(f32::NAN, 1.).is_nan() && slope(f32::NAN).is_nan());
        assert!(value(f64::NAN, 1.).is_nan() && slope(f64::NAN).is_nan());
    }
}
