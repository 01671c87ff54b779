//! The scale format of the OCP microscaling (MX) formats.

use std::fmt;

use crate::types::by_value;

/// A power of two from 2^-127 to 2^127, or NaN: the value of a code is `2^(code - 127)`, 0xFF is NaN.
///
/// It has no sign and no zero, and is used for scales only. A stored one is a dequant_scale: it multiplies the element
/// after decoding.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct E8M0(u8);

impl E8M0 {
    /// 2^127.
    pub const MAX: Self = Self(0xFE);
    /// 2^-127.
    pub const MIN: Self = Self(0);
    /// 1.
    pub const ONE: Self = Self(127);
    /// NaN, the scale of a block that holds an infinity or a NaN.
    pub const NAN: Self = Self(0xFF);

    /// The power of two nearest to `value`, ties going up. Zero, negative numbers, infinity, NaN and numbers from 1.5 * 2^127
    /// give NaN.
    ///
    /// This is ml_dtypes' cast, where f32 subnormals above 2^-127 go up to 2^-126. PyTorch's differs in dropping the
    /// sign and in giving 2^-127 for zero. To make a scale from an amax, use
    /// [`mx_dequant_scale_rceil`](crate::mx_dequant_scale_rceil) or
    /// [`mx_dequant_scale_floor`](crate::mx_dequant_scale_floor).
    pub const fn from_f32(value: f32) -> Self {
        let bits = value.to_bits();
        if bits == 0 || bits >= 0x7F80_0000 {
            return Self::NAN;
        }
        let (exponent, fraction) = (bits >> 23, bits & 0x007F_FFFF);
        let up = fraction > 0x0040_0000 || (fraction == 0x0040_0000 && exponent > 0);
        Self((exponent + up as u32) as u8)
    }

    /// The value, exactly: 2^-127 is an f32 subnormal.
    #[inline]
    pub const fn to_f32(self) -> f32 {
        let normal = (self.0 as u32) << 23;
        let finite = if self.0 == 0 { 0x0040_0000 } else { normal };
        f32::from_bits(if self.is_nan() { 0x7FC0_0000 } else { finite })
    }

    /// The value of a code.
    #[inline]
    pub const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }

    /// The code.
    pub const fn to_bits(self) -> u8 {
        self.0
    }

    /// Whether this is NaN.
    #[inline]
    pub const fn is_nan(self) -> bool {
        self.0 == 0xFF
    }

    /// The exponent of the power of two, `None` for NaN.
    pub const fn exponent(self) -> Option<i32> {
        if self.is_nan() {
            None
        } else {
            Some(self.0 as i32 - 127)
        }
    }

    /// One over this, exactly: the quant_scale where this is the dequant_scale. NaN stays NaN.
    #[inline]
    pub const fn reciprocal(self) -> Self {
        if self.is_nan() {
            self
        } else {
            Self(254 - self.0)
        }
    }
}

impl Default for E8M0 {
    /// 1, the scale that changes nothing.
    fn default() -> Self {
        Self::ONE
    }
}

impl fmt::Debug for E8M0 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exponent() {
            Some(exponent) => write!(f, "E8M0(2^{exponent})"),
            None => f.write_str("E8M0(NaN)"),
        }
    }
}

by_value!(E8M0);
