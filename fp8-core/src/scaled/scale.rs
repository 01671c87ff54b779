//! One scale.

use super::ScaledError;
use crate::E8M0;
use std::fmt;

/// The scale of a tensor in scaled arithmetic: `value = data * scale`.
///
/// A power of two from 2^-126 to 2^127, or 0 for a tensor of zeros, which has no size. [`Scale::lenient`] makes others, for
/// data that comes from elsewhere.
///
/// ```
/// use fp8_core::scaled::Scale;
/// assert_eq!(Scale::new(0.25)?.exponent(), Some(-2));
/// assert!(Scale::new(3.0).is_err());
/// assert_eq!(Scale::lenient(3.0)?.exponent(), None);
/// # Ok::<(), fp8_core::scaled::ScaledError>(())
/// ```
#[derive(Clone, Copy, PartialEq, PartialOrd)]
pub struct Scale(f32);

/// Which scales a tensor may be given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScaleCheck {
    /// Powers of two only.
    #[default]
    Strict,
    /// Any finite number from 0 up.
    Lenient,
}

impl ScaleCheck {
    /// The scale that is worth `scale`.
    ///
    /// # Errors
    /// As [`Scale::new`] or [`Scale::lenient`].
    pub fn check(self, scale: f32) -> Result<Scale, ScaledError> {
        match self {
            Self::Strict => Scale::new(scale),
            Self::Lenient => Scale::lenient(scale),
        }
    }
}

impl Scale {
    /// 1.
    pub const ONE: Self = Self(1.0);
    /// 0, the scale of a tensor of zeros.
    pub const ZERO: Self = Self(0.0);
    /// 2^-126, the smallest normal f32.
    pub const MIN: Self = Self(f32::MIN_POSITIVE);
    /// 2^127.
    pub const MAX: Self = Self(f32::from_bits(0x7F00_0000));

    /// A power of two from 2^-126 to 2^127.
    ///
    /// # Errors
    /// If `scale` is something else, 0 included.
    pub const fn new(scale: f32) -> Result<Self, ScaledError> {
        match Self::lenient(scale) {
            Ok(checked) if checked.is_power_of_two() => Ok(checked),
            Ok(_) => Err(ScaledError::NotPowerOfTwo { got: scale }),
            Err(error) => Err(error),
        }
    }

    /// Any finite number from 0 up.
    ///
    /// # Errors
    /// If `scale` is negative, infinite or NaN.
    pub const fn lenient(scale: f32) -> Result<Self, ScaledError> {
        if !scale.is_finite() {
            return Err(ScaledError::NotFinite { got: scale });
        }
        if scale < 0.0 {
            return Err(ScaledError::Negative { got: scale });
        }
        // Without the sign of -0.
        Ok(Self(scale.abs()))
    }

    /// 2^`exponent`, held to 2^-126..2^127.
    pub const fn power_of_two(exponent: i32) -> Self {
        let exponent = if exponent < -126 {
            -126
        } else if exponent > 127 {
            127
        } else {
            exponent
        };
        Self(f32::from_bits(((exponent + 127) as u32) << 23))
    }

    /// The number.
    pub const fn to_f32(self) -> f32 {
        self.0
    }

    /// Whether this is the scale of a tensor of zeros.
    pub const fn is_zero(self) -> bool {
        self.0 == 0.0
    }

    /// Whether this is a power of two in the range of normal f32 numbers.
    pub const fn is_power_of_two(self) -> bool {
        let bits = self.0.to_bits();
        bits & 0x007F_FFFF == 0 && bits >= 0x0080_0000
    }

    /// The exponent of a power of two.
    pub const fn exponent(self) -> Option<i32> {
        if self.is_power_of_two() {
            Some((self.0.to_bits() >> 23) as i32 - 127)
        } else {
            None
        }
    }

    /// The scale as a dequant_scale of the microscaling formats. A scale of 0 has no code: such a tensor is stored with the scale
    /// 1 and data of 0.
    ///
    /// # Errors
    /// If the scale is not a power of two.
    pub fn to_e8m0(self) -> Result<E8M0, ScaledError> {
        match self.exponent() {
            Some(_) => Ok(E8M0::from_f32(self.0)),
            None => Err(ScaledError::NoE8m0 { got: self.0 }),
        }
    }

    /// The scale that an E8M0 code means. The least code, 2^-127, is below the range of scales and gives 2^-126 with half of
    /// it left for the data: the second number, 1 otherwise.
    ///
    /// # Errors
    /// If the code is NaN.
    pub fn from_e8m0(code: E8M0) -> Result<(Self, f32), ScaledError> {
        match code.exponent() {
            None => Err(ScaledError::NotFinite { got: f32::NAN }),
            Some(-127) => Ok((Self::MIN, 0.5)),
            Some(exponent) => Ok((Self::power_of_two(exponent), 1.0)),
        }
    }
}

impl Default for Scale {
    /// 1.
    fn default() -> Self {
        Self::ONE
    }
}

impl fmt::Debug for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.exponent() {
            Some(exponent) => write!(f, "Scale(2^{exponent})"),
            None => write!(f, "Scale({:e})", self.0),
        }
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl From<Scale> for f32 {
    fn from(scale: Scale) -> Self {
        scale.0
    }
}
