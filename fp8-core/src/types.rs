//! One value of each element format, as a newtype over its code.

use std::fmt;

use half::{bf16, f16};

use crate::{cast::Cast, format::Format};

/// Shows, compares and converts codes by their values.
macro_rules! by_value {
    ($name:ident) => {
        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(&self.to_f32(), f)
            }
        }

        impl PartialEq for $name {
            fn eq(&self, other: &Self) -> bool {
                self.to_f32() == other.to_f32()
            }
        }

        impl PartialOrd for $name {
            fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
                self.to_f32().partial_cmp(&other.to_f32())
            }
        }

        impl From<$name> for f32 {
            fn from(value: $name) -> Self {
                value.to_f32()
            }
        }

        impl From<$name> for f64 {
            fn from(value: $name) -> Self {
                value.to_f32().into()
            }
        }
    };
}
pub(crate) use by_value;

macro_rules! element_type {
    ($(#[$doc:meta])* $name:ident, $format:expr) => {
        $(#[$doc])*
        ///
        /// Comparison is by value: NaN equals nothing, and -0 equals 0 where the format has both.
        #[derive(Clone, Copy, Default)]
        #[repr(transparent)]
        pub struct $name(u8);

        impl $name {
            /// The format of the type.
            pub const FORMAT: Format = $format;
            /// The largest finite value.
            pub const MAX: Self = Self($format.max_code());
            /// The smallest finite value, `-MAX`.
            pub const MIN: Self = Self($format.max_code() | 0x80);
            /// The smallest positive normal value.
            pub const MIN_POSITIVE: Self = Self(1 << $format.mantissa_bits());
            /// The smallest positive value.
            pub const MIN_POSITIVE_SUBNORMAL: Self = Self(1);
            /// The distance from 1 to the next larger value.
            pub const EPSILON: Self = Self((($format.bias() - $format.mantissa_bits()) << $format.mantissa_bits()) as u8);
            /// Zero.
            pub const ZERO: Self = Self(0);
            /// One.
            pub const ONE: Self = Self(($format.bias() << $format.mantissa_bits()) as u8);
            /// A NaN.
            pub const NAN: Self = Self($format.nan_code());

            /// The nearest value, ties to even, saturating at the largest finite one. See [`Cast`] for other roundings.
            pub fn from_f32(value: f32) -> Self {
                Self(Cast::new($format).encode(value, 0))
            }

            /// The value, exactly.
            pub const fn to_f32(self) -> f32 {
                $format.decode(self.0)
            }

            /// The value of a code.
            pub const fn from_bits(bits: u8) -> Self {
                Self(bits)
            }

            /// The code.
            pub const fn to_bits(self) -> u8 {
                self.0
            }

            /// Whether this is NaN.
            pub const fn is_nan(self) -> bool {
                $format.is_nan(self.0)
            }

            /// Whether this is an infinity; only [`E5M2`] has one.
            pub const fn is_infinite(self) -> bool {
                $format.is_infinite(self.0)
            }

            /// Whether this is neither infinite nor NaN.
            pub const fn is_finite(self) -> bool {
                $format.is_finite(self.0)
            }

            /// Whether the sign bit is set: also for -0, and for NaN where the format has one of each sign.
            pub const fn is_sign_negative(self) -> bool {
                self.0 & 0x80 != 0 && ($format.has_negative_zero() || self.0 != 0x80)
            }

            /// The opposite of [`Self::is_sign_negative`].
            pub const fn is_sign_positive(self) -> bool {
                !self.is_sign_negative()
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({:?})"), self.to_f32())
            }
        }

        by_value!($name);

        impl From<$name> for bf16 {
            fn from(value: $name) -> Self {
                Self::from_f32(value.to_f32())
            }
        }

        impl From<$name> for f16 {
            fn from(value: $name) -> Self {
                Self::from_f32(value.to_f32())
            }
        }
    };
}

element_type! {
    /// A value of [`Format::E4M3`]: up to 448, no infinity.
    E4M3, Format::E4M3
}

element_type! {
    /// A value of [`Format::E5M2`]: up to 57344, with infinities.
    E5M2, Format::E5M2
}

element_type! {
    /// A value of [`Format::E4M3Fnuz`]: up to 240, no infinity, no -0.
    E4M3Fnuz, Format::E4M3Fnuz
}

element_type! {
    /// A value of [`Format::E5M2Fnuz`]: up to 57344, no infinity, no -0.
    E5M2Fnuz, Format::E5M2Fnuz
}

impl E5M2 {
    /// Positive infinity.
    pub const INFINITY: Self = Self(0x7C);
    /// Negative infinity.
    pub const NEG_INFINITY: Self = Self(0xFC);
}
