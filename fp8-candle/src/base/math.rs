//! Scalar functions and reductions of the fused CPU kernels, written so that LLVM vectorizes them: no branches, no calls,
//! sums in independent lanes.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A type in which kernels compute: f32, or f64 for f64 tensors.
pub trait Real:
    Copy
    + Debug
    + Send
    + Sync
    + PartialOrd
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + 'static
{
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// -Inf.
    const NEG_INFINITY: Self;

    /// `x` rounded to this type.
    fn from_f64(x: f64) -> Self;
    /// This number in f64.
    fn to_f64(self) -> f64;
    /// `self * a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Magnitude.
    fn abs(self) -> Self;
    /// `e^self`, in f32 by a polynomial within 1.01 ulp that compilers vectorize.
    fn exp(self) -> Self;
    /// The version of a function that belongs to this type.
    fn by(self, versions: (impl Fn(f32) -> f32, impl Fn(f64) -> f64)) -> Self;
}

macro_rules! real {
    ($float:ty, $exp:path, $version:tt) => {
        impl Real for $float {
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const NEG_INFINITY: Self = <$float>::NEG_INFINITY;

            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $float
            }

            #[inline(always)]
            fn to_f64(self) -> f64 {
                f64::from(self)
            }

            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                <$float>::mul_add(self, a, b)
            }

            #[inline(always)]
            fn sqrt(self) -> Self {
                <$float>::sqrt(self)
            }

            #[inline(always)]
            fn ln(self) -> Self {
                <$float>::ln(self)
            }

            #[inline(always)]
            fn abs(self) -> Self {
                <$float>::abs(self)
            }

            #[inline(always)]
            fn exp(self) -> Self {
                $exp(self)
            }

            #[inline(always)]
            fn by(self, versions: (impl Fn(f32) -> f32, impl Fn(f64) -> f64)) -> Self {
                (versions.$version)(self)
            }
        }
    };
}
real!(f32, exp, 0);
real!(f64, f64::exp, 1);

/// e^x within 1.01 ulp, for any x. Results below the smallest normal number are 0, since arithmetic on subnormals is slow;
/// NaN gives NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2, and e^r is the polynomial of Cephes' `expf` (S. L. Moshier).
#[inline(always)]
fn exp(x: f32) -> f32 {
    const MIN_NORMAL: f32 = -87.336_54; // ln 2^-126, rounded up
    const MAX: f32 = 90.0; // e^x is Inf from 88.73 on
    const LN_2_HIGH: f32 = 0.693_359_4; // 355 / 512, so that n * LN_2_HIGH is exact
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23: the low bits of a sum with it are the nearest integer

    // Comparisons with NaN are false, so NaN passes.
    let bounded = if x > MAX { MAX } else { x };
    let bounded = if bounded < MIN_NORMAL {
        MIN_NORMAL
    } else {
        bounded
    };
    let rounded = bounded.mul_add(std::f32::consts::LOG2_E, ROUND);
    let n = rounded - ROUND;
    let r = n.mul_add(-LN_2_HIGH, bounded);
    let r = n.mul_add(-LN_2_LOW, r);
    let p = 1.987_569_2e-4_f32;
    let p = p.mul_add(r, 1.398_2e-3);
    let p = p.mul_add(r, 8.333_452e-3);
    let p = p.mul_add(r, 4.166_579_6e-2);
    let p = p.mul_add(r, 0.166_666_65);
    let p = p.mul_add(r, 0.5);
    let p = p.mul_add(r * r, r) + 1.0;

    // Two factors, since 2^128 alone would be Inf, though p < 1.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
    let result = p * power(n >> 1) * power(n - (n >> 1));
    if x < MIN_NORMAL { 0.0 } else { result }
}

/// Independent sums of a reduction: enough for two vectors of any instruction set. Fixed, so that the order of additions,
/// and with it every bit of a sum, depends only on the length.
const LANES: usize = 32;

/// Sum of `term(x)`.
#[inline(always)]
pub fn sum<R: Real>(x: &[R], term: impl Fn(R) -> R) -> R {
    let mut lanes = [R::ZERO; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += term(x);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane += term(x);
    }
    merge(lanes, |a, b| a + b)
}

/// Sum of `term(x, y)` over two slices of the same length.
#[inline(always)]
pub(crate) fn sum2<R: Real>(x: &[R], y: &[R], term: impl Fn(R, R) -> R) -> R {
    let mut lanes = [R::ZERO; LANES];
    let (x_chunks, x_tail) = x.as_chunks::<LANES>();
    let (y_chunks, y_tail) = y.as_chunks::<LANES>();
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        for lane in 0..LANES {
            lanes[lane] += term(x[lane], y[lane]);
        }
    }
    for ((lane, &x), &y) in lanes.iter_mut().zip(x_tail).zip(y_tail) {
        *lane += term(x, y);
    }
    merge(lanes, |a, b| a + b)
}

/// Largest `term(x)`, ignoring NaN; -Inf for an empty slice.
#[inline(always)]
pub fn max<R: Real>(x: &[R], term: impl Fn(R) -> R) -> R {
    let larger = |a: R, b: R| if b > a { b } else { a };
    let mut lanes = [R::NEG_INFINITY; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, term(x));
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(tail) {
        *lane = larger(*lane, term(x));
    }
    merge(lanes, larger)
}

// Not inlined, or LLVM would arrange the loops above for the shuffles of this tree.
#[inline(never)]
fn merge<R: Real>(mut lanes: [R; LANES], merge: impl Fn(R, R) -> R) -> R {
    let mut width = LANES / 2;
    while width > 0 {
        for lane in 0..width {
            lanes[lane] = merge(lanes[lane], lanes[lane + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_about_an_ulp() {
        for step in -873_365..=887_228 {
            let x = step as f32 * 1e-4;
            let expected = f64::from(x).exp();
            if expected < f64::from(f32::MIN_POSITIVE) || expected > f64::from(f32::MAX) {
                continue;
            }
            let rounded = expected as f32;
            let ulp = f64::from(f32::from_bits(rounded.to_bits() + 1)) - f64::from(rounded);
            let error = (f64::from(exp(x)) - expected).abs() / ulp;
            assert!(
                error <= 1.01,
                "exp({x}) = {}, expected {expected}: {error} ulp",
                exp(x)
            );
        }
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(88.73), f32::INFINITY);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert_eq!(exp(-87.4), 0.0);
        assert_eq!(exp(-1e30), 0.0);
        assert!(exp(f32::NAN).is_nan());
        assert!(exp(-f32::NAN).is_nan());
    }

    #[test]
    fn reductions_of_every_length() {
        for n in 0..100 {
            let x: Vec<f64> = (0..n).map(|i| ((i * 37) % 101) as f64 - 50.0).collect();
            assert_eq!(sum(&x, |x| x), x.iter().sum::<f64>(), "n = {n}");
            assert_eq!(
                sum2(&x, &x, |x, y| x * y),
                x.iter().map(|x| x * x).sum::<f64>(),
                "n = {n}"
            );
            assert_eq!(
                max(&x, |x| x),
                x.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b)),
                "n = {n}"
            );
        }
    }
}
