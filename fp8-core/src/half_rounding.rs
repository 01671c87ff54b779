//! Stochastic rounding of f32 to the 16-bit types: the definition.

use half::{bf16, f16};

use crate::{HighPrecision, cast::Between};

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
    /// A value that the type can represent is unchanged, subnormals included. Above the largest finite value comes infinity,
    /// at the distance that the next value would have; values beyond that are infinite. NaN stays NaN with its sign.
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
fn round(bits: u32, word: u32, mantissa_bits: u32, bias: u32) -> u16 {
    let magnitude = bits & 0x7FFF_FFFF;
    let between = Between::new(magnitude, mantissa_bits, bias);
    let infinity = ((1 << (15 - mantissa_bits)) - 1) << mantissa_bits;
    let rounded = (between.lower + u32::from(between.goes_up(word))).min(infinity);
    let nan = infinity | 1 << (mantissa_bits - 1);
    let mag = if magnitude > 0x7F80_0000 {
        nan
    } else {
        rounded
    };
    (mag | (bits >> 16) & 0x8000) as u16
}
