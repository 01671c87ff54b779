//! Stochastic rounding of f32 to the 16-bit types: the definition.

use half::{bf16, f16};

use crate::HighPrecision;

/// A 16-bit type to round to: bf16 or f16. Sealed.
///
/// ```
/// use fp8_core::HalfPrecision;
/// use half::bf16;
/// // A quarter of the way from 1 to the next bf16: up for a quarter of all words.
/// let x = 1.0 + 0.25 / 128.0;
/// assert_eq!(bf16::from_f32_stochastic(x, 0).to_f32(), 1.0 + 1.0 / 128.0);
/// assert_eq!(bf16::from_f32_stochastic(x, (1 << 30) - 1).to_f32(), 1.0 + 1.0 / 128.0);
/// assert_eq!(bf16::from_f32_stochastic(x, 1 << 30).to_f32(), 1.0);
/// ```
pub trait HalfPrecision: HighPrecision {
    /// One of the two values next to `value`, by a random `word`: the one away from zero where the word is below
    /// `floor(f * 2^32)`, with `f` the distance to the one next to zero as a fraction of the gap. That is the rule of
    /// [`Rounding::Stochastic`](crate::Rounding::Stochastic), so the mean over all words is `value` wherever `f` has at most 32
    /// bits: always in bf16, and in f16 for every value of at least 2^-9 subnormal steps (2^-33).
    ///
    /// A value that the type has stays as it is, subnormals included. Beyond the largest finite value the next one up is
    /// infinity, at the distance that the next value would have; values beyond that are infinite. NaN stays NaN with its sign.
    fn from_f32_stochastic(value: f32, word: u32) -> Self;
}

impl HalfPrecision for bf16 {
    #[inline(always)]
    fn from_f32_stochastic(value: f32, word: u32) -> Self {
        Self::from_bits(round(value.to_bits(), word, 7, 127))
    }
}

impl HalfPrecision for f16 {
    #[inline(always)]
    fn from_f32_stochastic(value: f32, word: u32) -> Self {
        Self::from_bits(round(value.to_bits(), word, 10, 15))
    }
}

/// The bits of the 16-bit value with this layout. Integers only and no branches, so that loops around it vectorize.
#[inline(always)]
fn round(bits: u32, word: u32, mantissa_bits: u32, bias: i32) -> u16 {
    let m = mantissa_bits as i32;
    let magnitude = bits & 0x7FFF_FFFF;

    // |x| = significand * 2^(exponent - 150), f32 subnormals included.
    let exponent = (magnitude >> 23).max(1) as i32;
    let significand = magnitude & 0x007F_FFFF | (magnitude >> 23).min(1) << 23;

    // The last place of the target is fixed below its smallest normal exponent, so the shift grows there.
    let shift = (23 - m).max(151 - bias - m - exponent) as u32;
    let binade = ((exponent - 128 + bias).max(0) as u32) << mantissa_bits;
    let floor = significand >> shift.min(31);
    let rest = significand & ((1 << shift.min(31)) - 1);
    let threshold = if shift <= 32 {
        rest << (32 - shift)
    } else {
        significand >> (shift - 32).min(31)
    };

    let infinity = ((1 << (15 - mantissa_bits)) - 1) << mantissa_bits;
    let rounded = (binade + floor + u32::from(word < threshold)).min(infinity);
    let nan = infinity | 1 << (mantissa_bits - 1);
    let mag = if magnitude > 0x7F80_0000 {
        nan
    } else {
        rounded
    };
    (mag | (bits >> 16) & 0x8000) as u16
}
