//! Scalar nearest-even casts from f32 to 8 bits and to f16.

use crate::cast::{Cast, Overflow, Rounding};

/// A nearest-even cast from f32 to a narrower format, as the constants of one branch-free body.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Narrowing {
    /// How many more mantissa bits f32 has.
    pub(super) shift: u32,
    /// Bits of the smallest normal value of the target.
    pub(super) min_normal: u32,
    /// Bits of the magnitude at which values are clamped: anything larger has the same code.
    pub(super) cap: u32,
    nan_mag: u32,
    /// The sign bits that zero keeps.
    pub(super) zero_sign: u32,
}

impl Narrowing {
    /// f32 to f16, with the sign at bit 15.
    pub(crate) const F16: Self = Self::with_layout(10, 15, 0x7C00, 0x7E00, u32::MAX);

    const fn with_layout(
        mantissa_bits: u32,
        bias: u32,
        overflow_mag: u32,
        nan_mag: u32,
        zero_sign: u32,
    ) -> Self {
        let shift = 23 - mantissa_bits;
        Self {
            shift,
            min_normal: (127 + 1 - bias) << 23,
            // Overflow gives the code of the largest finite value, or the one after it, which stands for the next value.
            cap: (overflow_mag << shift) + ((127 - bias) << 23),
            nan_mag,
            zero_sign,
        }
    }

    /// The constants of `cast`, if it is such a cast.
    pub(crate) fn new(cast: &Cast) -> Option<Self> {
        if cast.rounding != Rounding::NearestEven || cast.via_f16 {
            return None;
        }
        let spec = cast.format.spec();
        let overflow_mag = match cast.overflow {
            Overflow::Saturate => spec.max_mag,
            Overflow::NonFinite => spec.inf_mag,
        };
        let zero_sign = if spec.has_negative_zero { u32::MAX } else { 0 };
        Some(Self::with_layout(
            spec.mantissa_bits,
            spec.bias,
            overflow_mag,
            spec.nan_mag,
            zero_sign,
        ))
    }

    /// The code of the f32 with these `bits`; `sign` is its sign bit, where the target has it.
    #[inline(always)]
    pub(crate) fn round(self, bits: u32, sign: u32) -> u32 {
        let magnitude = bits & 0x7FFF_FFFF;
        let capped = magnitude.min(self.cap);
        let binade = capped.max(self.min_normal) & 0x7F80_0000;
        // A power of two whose last place is that of the target in this binade: adding it rounds there, and leaves the
        // rounded value in its low bits, counted in last places.
        let magic = binade.wrapping_add(self.shift << 23);
        let sum = (f32::from_bits(capped) + f32::from_bits(magic)).to_bits();
        let codes_below = (binade - self.min_normal).wrapping_shr(self.shift);
        let mag = sum.wrapping_sub(magic).wrapping_add(codes_below);
        let mag = if magnitude > 0x7F80_0000 {
            self.nan_mag
        } else {
            mag
        };
        let sign = if mag == 0 {
            sign & self.zero_sign
        } else {
            sign
        };
        mag | sign
    }
}
