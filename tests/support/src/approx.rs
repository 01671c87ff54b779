//! Numbers with a bound on what rounding does to them: a running error analysis (Higham, Accuracy and Stability of Numerical
//! Algorithms, section 3.3). A formula written with them gives the exact result, in f64, and how far the same formula may be
//! off in the arithmetic of a kernel.

use crate::on_cuda;
use crate::rounding::{LAMBDA, UNIT, UNIT_F64};
use candle_core::DType;
use std::ops::{Add, Div, Mul, Sub};

/// A number and how far it may be off.
#[derive(Debug, Clone, Copy)]
pub struct Approx {
    /// The exact number.
    pub value: f64,
    /// The largest error, to first order, in units of the largest relative error of one rounding (2^-24 in f32).
    pub error: f64,
}

impl Approx {
    /// A number without an error.
    pub fn exact(value: f64) -> Self {
        Self { value, error: 0.0 }
    }

    /// A constant, rounded by the kernel.
    pub fn constant(value: f64) -> Self {
        Self::exact(value).rounded(1.0)
    }

    /// After this many more roundings of the value.
    pub fn rounded(self, roundings: f64) -> Self {
        self.off_by(roundings * self.value.abs())
    }

    /// With this much more error.
    pub fn off_by(self, error: f64) -> Self {
        Self {
            error: self.error + error,
            ..self
        }
    }

    /// Written to memory in `dtype` by a kernel that computes in f32, and read again.
    pub fn stored(self, dtype: DType) -> Self {
        let relative = unit_of_16_bits(dtype) * self.value.abs();
        // Half the distance of the subnormal numbers of f16, which small factors reach.
        let subnormal = match dtype {
            DType::F16 => 2f64.powi(-25),
            _ => 0.0,
        };
        self.off_by(relative.max(subnormal) / UNIT)
    }

    /// The magnitude.
    pub fn abs(self) -> Self {
        Self {
            value: self.value.abs(),
            ..self
        }
    }

    /// The square root.
    pub fn sqrt(self) -> Self {
        let value = self.value.sqrt();
        let error = self.error / (2.0 * value);
        Self { value, error }.rounded(1.0)
    }

    /// The exponential, within 2 ulp of two roundings each: the worst of our kernels.
    pub fn exp(self) -> Self {
        let value = self.value.exp();
        let error = self.error * value;
        Self { value, error }.rounded(4.0)
    }

    /// The natural logarithm, within an ulp.
    pub fn ln(self) -> Self {
        let (value, error) = (self.value.ln(), self.error / self.value.abs());
        Self { value, error }.rounded(2.0)
    }

    /// How far a result in `dtype` may be from the value.
    pub fn bound(self, dtype: DType) -> f64 {
        // A hundredth for the terms of second order.
        let error = 1.01 * self.error;
        if dtype == DType::F64 {
            // The value itself is computed in f64, too.
            return 2.0 * UNIT_F64 * error;
        }
        // Kernels may flush subnormal numbers.
        let error = UNIT * error + f64::from(f32::MIN_POSITIVE);
        let subnormal = match dtype {
            DType::F16 => 2f64.powi(-25),
            _ => 0.0,
        };
        error + unit_of_16_bits(dtype) * (self.value.abs() + error) + subnormal
    }
}

/// The largest relative error of a rounding to `dtype`, if that has 16 bits.
fn unit_of_16_bits(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        _ => 0.0,
    }
}

impl Add for Approx {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let error = self.error + other.error;
        Self {
            value: self.value + other.value,
            error,
        }
        .rounded(1.0)
    }
}

impl Sub for Approx {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        let error = self.error + other.error;
        Self {
            value: self.value - other.value,
            error,
        }
        .rounded(1.0)
    }
}

impl Mul for Approx {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        let error = self.value.abs() * other.error + other.value.abs() * self.error;
        Self {
            value: self.value * other.value,
            error,
        }
        .rounded(1.0)
    }
}

impl Div for Approx {
    type Output = Self;

    /// Also by way of the reciprocal: two roundings.
    fn div(self, other: Self) -> Self {
        let value = self.value / other.value;
        let error = (self.error + value.abs() * other.error) / other.value.abs();
        Self { value, error }.rounded(2.0)
    }
}

/// A sum in which each term passes through at most `additions` additions. The value is summed with compensation (Neumaier).
pub fn sum(terms: impl Iterator<Item = Approx>, additions: usize) -> Approx {
    let (value, magnitude, _) = compensated(terms);
    value.off_by(additions as f64 * magnitude)
}

/// [`sum`] of terms whose signs are as good as random, with the smaller bound of `rounding.rs` for such sums.
pub fn sum_random(terms: impl Iterator<Item = Approx>, additions: usize) -> Approx {
    let (value, magnitude, square) = compensated(terms);
    let additions = additions as f64;
    let always = additions * magnitude;
    value.off_by(always.min(LAMBDA * (additions * square).sqrt()))
}

/// The sum with the errors of its terms alone, their magnitude and the sum of their squares.
fn compensated(terms: impl Iterator<Item = Approx>) -> (Approx, f64, f64) {
    let (mut value, mut lost, mut error) = (0f64, 0f64, 0f64);
    let (mut magnitude, mut square) = (0f64, 0f64);
    for term in terms {
        let next = value + term.value;
        lost += match value.abs() >= term.value.abs() {
            true => (value - next) + term.value,
            false => (term.value - next) + value,
        };
        value = next;
        error += term.error;
        magnitude += term.value.abs();
        square += term.value * term.value;
    }
    let value = value + lost;
    (Approx { value, error }, magnitude, square)
}

/// Additions on the way of a term of a sum over a row of `len` elements.
pub fn additions(len: usize) -> usize {
    match on_cuda() {
        // In any order.
        true => len,
        // 32 lanes, then a tree.
        false => len.div_ceil(32) + 5,
    }
}

/// An element of a product of matrices, a sum of `len` products.
///
/// `random`: the signs of the terms are as good as random. On the tensor cores of a GPU, which truncate, that does not help.
pub fn dot(terms: impl Iterator<Item = (Approx, Approx)>, len: usize, random: bool) -> Approx {
    let products = terms.map(|(a, b)| Approx {
        value: a.value * b.value,
        error: a.value.abs() * b.error + b.value.abs() * a.error,
    });
    match (on_cuda(), random) {
        // f32 as three products of tf32, which has 11 bits: 3 * 2^-22. Truncation costs two roundings for each of 16 terms.
        (true, _) => sum(products, 12 + 32 + len),
        (false, true) => sum_random(products, len + 1),
        (false, false) => sum(products, len + 1),
    }
}

/// Fails where a result is further from its value than rounding explains.
#[track_caller]
pub fn assert_within(got: &[f64], expected: &[Approx], dtype: DType, case: &str) {
    assert_eq!(got.len(), expected.len(), "{case}");
    for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
        let (error, bound) = ((got - expected.value).abs(), expected.bound(dtype));
        assert!(
            error <= bound,
            "{case}, {dtype:?}, element {i}: got {got}, expected {} within {bound:e}, off by {error:e}",
            expected.value
        );
    }
}
