//! Which types are element types, and how each becomes f32 and back.

use crate::HighPrecision;
use crate::high_precision::sealed::{self, Kind};
use crate::kernels::{self, convert};
use half::{bf16, f16};

/// Magnitudes as integers of type `$Magnitude`, and the bits of the f32 of the same value.
macro_rules! sealed {
    ($float:ty, $kind:ident, $Magnitude:ty, |$x:ident| $magnitude:expr, |$m:ident| $bits:expr) => {
        impl sealed::Sealed for $float {
            const KIND: Kind = Kind::$kind;
            type Magnitude = $Magnitude;

            #[inline(always)]
            fn magnitude(self) -> $Magnitude {
                let $x = self;
                $magnitude
            }

            #[inline(always)]
            fn sign_bit(self) -> bool {
                self.is_sign_negative()
            }

            #[inline(always)]
            fn magnitude_bits($m: $Magnitude) -> u32 {
                $bits
            }
        }
    };
}
sealed!(f32, F32, u32, |x| x.to_bits() & 0x7FFF_FFFF, |m| m);
sealed!(f64, F64, u32, |x| x.to_f32().to_bits() & 0x7FFF_FFFF, |m| m);
// Signed: baseline x86-64 has a maximum for signed words only.
sealed!(bf16, Bf16, i16, |x| (x.to_bits() & 0x7FFF) as i16, |m| {
    convert::bf16_to_f32(bf16::from_bits(m as u16)).to_bits()
});
sealed!(f16, F16, i16, |x| (x.to_bits() & 0x7FFF) as i16, |m| {
    convert::f16_to_f32(f16::from_bits(m as u16)).to_bits()
});

impl HighPrecision for f32 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value
    }
}

impl HighPrecision for bf16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        convert::bf16_to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        convert::f32_to_bf16(value)
    }
}

impl HighPrecision for f16 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        convert::f16_to_f32(self)
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        convert::f32_to_f16(value)
    }

    // Processors with vectors have an instruction for this, ten times faster than the integer arithmetic.
    fn narrow(values: &[f32], narrowed: &mut [Self]) {
        kernels::halves::narrow_f16(kernels::Isa::best(), values, narrowed);
    }
}

impl HighPrecision for f64 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // The conversion does not define the sign of a NaN.
        (self as f32).copysign(if self.is_sign_negative() { -1.0 } else { 1.0 })
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value.into()
    }
}
