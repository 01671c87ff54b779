//! The cast from f32 to an 8-bit format: the definition that every faster version equals bit for bit.

use half::f16;
use serde::{Deserialize, Serialize};

use crate::{
    error::named,
    format::{CodeSpec, Format},
    philox::{philox_of_each, philox4x32_10},
};

/// How a value between two codes is rounded. Every mode rounds once, directly from f32, subnormals included.
///
/// Displayed and parsed by name, such as `nearest_even`. The name has no stochastic key: parsing gives the default one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Rounding {
    /// To the nearest code, ties to the even one.
    #[default]
    NearestEven,
    /// Up or down at random, so that the mean is the value itself.
    ///
    /// With `f` the distance to the code next to zero as a fraction of the gap, the code away from zero is taken
    /// where the 32-bit word of the element is below `floor(f * 2^32)`: P(away) is `f` exactly where `f` has at most
    /// 32 bits (every value of at least 2^-9 subnormal steps), and at most 2^-32 less elsewhere.
    Stochastic(StochasticKey),
    /// Toward zero.
    TowardZero,
    /// To the nearest code, ties away from zero.
    NearestAway,
    /// Toward positive infinity: to the next code above, however near the one below is. The FP8 Emulation Toolkit's `RPINF` is
    /// another rounding: positive values to the nearest, ties up, negative ones toward zero.
    TowardPositive,
    /// Toward negative infinity. The toolkit's `RNINF` differs in the same way.
    TowardNegative,
}

/// What [`Rounding::Stochastic`] draws its bits from, besides the index of the element.
///
/// The bits come from Philox4x32-10 with counter `(element / 4 low, element / 4 high, step, tensor)` and key
/// `(seed low, seed high)`; an element takes word `element % 4`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct StochasticKey {
    /// The seed of the run.
    pub seed: u64,
    /// The training step: a new one for each rounding of the same tensor.
    pub step: u32,
    /// The tensor, so that two tensors of a step do not share their bits.
    pub tensor: u32,
}

impl StochasticKey {
    /// The random word of the element with this index.
    #[inline]
    pub const fn word(self, element: u64) -> u32 {
        self.block(element / 4)[(element % 4) as usize]
    }

    /// The words of the elements `4 * index .. 4 * index + 4`.
    #[inline]
    pub const fn block(self, index: u64) -> [u32; 4] {
        let counter = [index as u32, (index >> 32) as u32, self.step, self.tensor];
        philox4x32_10(counter, self.generator_key())
    }

    /// [`StochasticKey::block`] of `N` indices from `first` on.
    #[inline(always)]
    pub(crate) fn blocks<const N: usize>(self, first: u64) -> [[u32; 4]; N] {
        let index: [u64; N] = std::array::from_fn(|i| first.wrapping_add(i as u64));
        let counters = [
            index.map(|index| index & u64::from(u32::MAX)),
            index.map(|index| index >> 32),
            [u64::from(self.step); N],
            [u64::from(self.tensor); N],
        ];
        let words = philox_of_each(counters, self.generator_key());
        std::array::from_fn(|i| words.map(|word| word[i] as u32))
    }

    /// The seed as the key of the generator.
    const fn generator_key(self) -> [u32; 2] {
        [self.seed as u32, (self.seed >> 32) as u32]
    }
}

/// What values beyond the largest finite one become, decided after rounding.
///
/// Infinite inputs are treated as overflow. A directed mode that rounds a finite value toward zero stops at the
/// largest finite value under either choice, as in IEEE 754.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Overflow {
    /// The largest finite value of the same sign: torchao's and Transformer Engine's cast.
    #[default]
    Saturate,
    /// Infinity in `E5M2`, NaN in the formats that have none: the cast of ml_dtypes and of arXiv:2209.05433.
    NonFinite,
}

/// A cast to an 8-bit format.
///
/// ```
/// use fp8_core::{Cast, Format, Overflow};
///
/// let cast = Cast::new(Format::E4M3);
/// assert_eq!(cast.encode(1.0, 0), 0x38);
/// assert_eq!(cast.encode(1e6, 0), 0x7E); // 448
/// assert_eq!(cast.with_overflow(Overflow::NonFinite).encode(1e6, 0), 0x7F); // NaN
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Cast {
    /// The format cast to.
    pub format: Format,
    /// How values between two codes are rounded.
    #[serde(default)]
    pub rounding: Rounding,
    /// What values beyond the largest finite one become.
    #[serde(default)]
    pub overflow: Overflow,
    /// Round to f16 (nearest-even) first, as the FP8 Emulation Toolkit (mpemu) does: two roundings instead of one.
    /// In `E5M2`, 1.125 + 2^-20 then gives 1.0 instead of 1.25.
    #[serde(default)]
    pub via_f16: bool,
    /// The scales given to the cast are dequant_scales, which values are divided by, instead of quant_scales, which they are multiplied
    /// by. This is how compressed-tensors casts, and vLLM for inputs with a scale per token. The methods for one value do not look at it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub divides: bool,
}

impl Cast {
    /// The cast to `format` with nearest-even rounding and saturation.
    pub const fn new(format: Format) -> Self {
        Self {
            format,
            rounding: Rounding::NearestEven,
            overflow: Overflow::Saturate,
            via_f16: false,
            divides: false,
        }
    }

    /// The same cast with another rounding.
    pub const fn with_rounding(self, rounding: Rounding) -> Self {
        Self { rounding, ..self }
    }

    /// The same cast with another treatment of overflow.
    pub const fn with_overflow(self, overflow: Overflow) -> Self {
        Self { overflow, ..self }
    }

    /// The same cast with or without a first rounding to f16, see [`Cast::via_f16`].
    pub const fn with_via_f16(self, via_f16: bool) -> Self {
        Self { via_f16, ..self }
    }

    /// The same cast with or without a division by its scales, see [`Cast::divides`].
    pub const fn with_division(self, divides: bool) -> Self {
        Self { divides, ..self }
    }

    /// The one of these scales, or arrays of them, that a cast of many values takes, see [`Cast::divides`].
    pub const fn applied<'a, T: ?Sized>(&self, quant_scale: &'a T, dequant_scale: &'a T) -> &'a T {
        match self.divides {
            true => dequant_scale,
            false => quant_scale,
        }
    }

    /// The code of `x`. `element` is the index of `x` in its tensor; only stochastic rounding looks at it.
    ///
    /// NaN stays NaN, with the sign bit of `x` where the format has two; -0 stays -0 where the format has it. Every bit
    /// pattern has a code.
    pub fn encode(&self, x: f32, element: u64) -> u8 {
        let random = match self.rounding {
            Rounding::Stochastic(key) => key.word(element),
            _ => 0,
        };
        // A NaN has nothing to round, and the conversion does not promise to keep its sign.
        let x = if self.via_f16 && !x.is_nan() {
            f16::from_f32(x).to_f32()
        } else {
            x
        };
        Rounder::new(self).code(x.to_bits(), random)
    }

    /// The code of `x * quant_scale`, the product rounded to f32.
    ///
    /// A product that is NaN has the sign bit of `x`, whatever made it so: `x` itself, `Inf * 0` or a NaN `quant_scale`.
    /// Neither Rust nor hardware fixes the sign of a NaN that arithmetic makes, so no code may depend on it.
    pub fn encode_scaled(&self, x: f32, quant_scale: f32, element: u64) -> u8 {
        self.encode(f32::from_bits(scaled_bits(x, quant_scale)), element)
    }

    /// The code of `x / dequant_scale`, the quotient rounded to f32; a quotient that is NaN has the sign bit of `x`.
    pub fn encode_divided(&self, x: f32, dequant_scale: f32, element: u64) -> u8 {
        self.encode(f32::from_bits(divided_bits(x, dequant_scale)), element)
    }

    /// The value that `x` becomes: [`Cast::encode`], then [`Format::decode`].
    pub fn round(&self, x: f32, element: u64) -> f32 {
        self.format.decode(self.encode(x, element))
    }
}

/// The bits of `x * quant_scale`; a NaN has the sign of `x`, see [`Cast::encode_scaled`].
#[inline(always)]
pub(crate) fn scaled_bits(x: f32, quant_scale: f32) -> u32 {
    signed_bits(x * quant_scale, x, quant_scale)
}

/// The bits of `x / dequant_scale`; a NaN has the sign of `x`.
#[inline(always)]
pub(crate) fn divided_bits(x: f32, dequant_scale: f32) -> u32 {
    signed_bits(x / dequant_scale, x, dequant_scale)
}

/// The magnitude of a product or quotient of `x` and `scale`, with its sign or, if it is NaN, that of `x`.
#[inline(always)]
fn signed_bits(result: f32, x: f32, scale: f32) -> u32 {
    let magnitude = result.to_bits() & 0x7FFF_FFFF;
    let is_nan = magnitude > 0x7F80_0000;
    let flip = if is_nan { 0 } else { scale.to_bits() };
    magnitude | (x.to_bits() ^ flip) & 0x8000_0000
}

/// A magnitude of f32 between two neighbouring magnitudes of a narrower format.
#[derive(Clone, Copy)]
pub(crate) struct Between {
    /// The code of the smaller neighbour.
    pub(crate) lower: u32,
    /// The bits of the significand, of which the last `shift` lie below the format's last place.
    significand: u32,
    shift: u32,
}

impl Between {
    #[inline(always)]
    pub(crate) fn new(magnitude: u32, mantissa_bits: u32, bias: u32) -> Self {
        // |x| = significand * 2^(exponent - 150), f32 subnormals included.
        let exponent = (magnitude >> 23).max(1) as i32;
        let significand = magnitude & 0x007F_FFFF | (magnitude >> 23).min(1) << 23;

        // The format's last place is fixed below its smallest normal exponent, so the shift grows there.
        let (m, bias) = (mantissa_bits as i32, bias as i32);
        let shift = (23 - m).max(151 - bias - m - exponent) as u32;
        let binade = ((exponent - 128 + bias).max(0) as u32) << mantissa_bits;
        Self {
            lower: binade + (significand >> shift.min(31)),
            significand,
            shift,
        }
    }

    /// What lies above the smaller neighbour, and half of the gap. A shift of 31 already leaves none of the 24 bits, and a rest
    /// below half of the gap.
    #[inline(always)]
    fn rest(self) -> (u32, u32) {
        let capped = self.shift.min(31);
        (self.significand & ((1 << capped) - 1), 1 << (capped - 1))
    }

    /// Whether stochastic rounding by this random `word` takes the larger neighbour.
    #[inline(always)]
    pub(crate) fn goes_up(self, word: u32) -> bool {
        let threshold = if self.shift <= 32 {
            self.rest().0 << (32 - self.shift)
        } else {
            self.significand >> (self.shift - 32).min(31)
        };
        word < threshold
    }
}

/// [`Rounding`] without its key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    NearestEven,
    Stochastic,
    TowardZero,
    NearestAway,
    TowardPositive,
    TowardNegative,
}

impl From<Rounding> for Mode {
    fn from(rounding: Rounding) -> Self {
        match rounding {
            Rounding::NearestEven => Self::NearestEven,
            Rounding::Stochastic(_) => Self::Stochastic,
            Rounding::TowardZero => Self::TowardZero,
            Rounding::NearestAway => Self::NearestAway,
            Rounding::TowardPositive => Self::TowardPositive,
            Rounding::TowardNegative => Self::TowardNegative,
        }
    }
}

/// One cast, prepared for many elements. It uses integers only, and no branches once `mode` is known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rounder {
    spec: CodeSpec,
    mode: Mode,
    overflow_mag: u32,
}

impl Rounder {
    pub(crate) fn new(cast: &Cast) -> Self {
        let spec = cast.format.spec();
        let overflow_mag = match cast.overflow {
            Overflow::Saturate => spec.max_mag,
            Overflow::NonFinite => spec.inf_mag,
        };
        Self {
            spec,
            mode: cast.rounding.into(),
            overflow_mag,
        }
    }

    pub(crate) fn mode(self) -> Mode {
        self.mode
    }

    /// The same cast with another mode: with a constant one, loops over `code` vectorize.
    #[inline(always)]
    pub(crate) fn with_mode(self, mode: Mode) -> Self {
        Self { mode, ..self }
    }

    /// The code of the f32 with these `bits`; `random` decides stochastic rounding.
    #[inline(always)]
    pub(crate) fn code(self, bits: u32, random: u32) -> u8 {
        let CodeSpec {
            mantissa_bits,
            bias,
            max_mag,
            nan_mag,
            has_negative_zero,
            ..
        } = self.spec;
        let negative = bits >> 31 == 1;
        let magnitude = bits & 0x7FFF_FFFF;

        let between = Between::new(magnitude, mantissa_bits, bias);
        let (rest, half) = between.rest();
        let away = match self.mode {
            Mode::NearestEven => rest > half || (rest == half && between.lower & 1 == 1),
            Mode::NearestAway => rest >= half,
            Mode::TowardZero => false,
            Mode::TowardPositive => rest != 0 && !negative,
            Mode::TowardNegative => rest != 0 && negative,
            Mode::Stochastic => between.goes_up(random),
        };

        let mag = between.lower + away as u32;
        let toward_zero = match self.mode {
            Mode::TowardZero => true,
            Mode::TowardPositive => negative,
            Mode::TowardNegative => !negative,
            _ => false,
        };
        let finite = magnitude < 0x7F80_0000;
        let overflow_mag = if toward_zero && finite {
            max_mag
        } else {
            self.overflow_mag
        };
        let mag = if mag > max_mag { overflow_mag } else { mag };
        let mag = if magnitude > 0x7F80_0000 {
            nan_mag
        } else {
            mag
        };
        let sign = if negative && (mag != 0 || has_negative_zero) {
            0x80
        } else {
            0
        };
        (mag | sign) as u8
    }
}

named! {
    Rounding, "rounding",
    "nearest_even, stochastic, toward_zero, nearest_away, toward_positive or toward_negative":
    NearestEven "nearest_even",
    Stochastic(_ = StochasticKey::default()) "stochastic",
    TowardZero "toward_zero",
    NearestAway "nearest_away",
    TowardPositive "toward_positive",
    TowardNegative "toward_negative"
}

named!(Overflow, "overflow", "saturate or non_finite": Saturate "saturate", NonFinite "non_finite");
