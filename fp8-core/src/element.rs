//! Which types are element types, and how each becomes f32 and back.

use crate::HighPrecision;
use crate::high_precision::sealed::{self, Kind};
use crate::kernels::{self, convert};
use half::{bf16, f16};

impl sealed::Sealed for f32 {
    const KIND: Kind = Kind::F32;
    type Magnitude = u32;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_f32().to_bits() & 0x7FFF_FFFF
    }

    #[inline(always)]
    fn sign_bit(self) -> bool {
        self.is_sign_negative()
    }

    #[inline(always)]
    fn magnitude_bits(magnitude: u32) -> u32 {
        magnitude
    }
}
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

impl sealed::Sealed for bf16 {
    const KIND: Kind = Kind::Bf16;
    // Signed: baseline x86-64 has a maximum for signed words only.
    type Magnitude = i16;

    #[inline(always)]
    fn magnitude(self) -> i16 {
        (self.to_bits() & 0x7FFF) as i16
    }

    #[inline(always)]
    fn sign_bit(self) -> bool {
        self.is_sign_negative()
    }

    #[inline(always)]
    fn magnitude_bits(magnitude: i16) -> u32 {
        HighPrecision::to_f32(Self::from_bits(magnitude as u16)).to_bits()
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

impl sealed::Sealed for f16 {
    const KIND: Kind = Kind::F16;
    // Signed: baseline x86-64 has a maximum for signed words only.
    type Magnitude = i16;

    #[inline(always)]
    fn magnitude(self) -> i16 {
        (self.to_bits() & 0x7FFF) as i16
    }

    #[inline(always)]
    fn sign_bit(self) -> bool {
        self.is_sign_negative()
    }

    #[inline(always)]
    fn magnitude_bits(magnitude: i16) -> u32 {
        HighPrecision::to_f32(Self::from_bits(magnitude as u16)).to_bits()
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

    // Processors with vectors have an instruction for it, which takes a tenth of the integer arithmetic.
    fn narrow(values: &[f32], narrowed: &mut [Self]) {
        kernels::halves::narrow_f16(kernels::Isa::best(), values, narrowed);
    }
}

impl sealed::Sealed for f64 {
    const KIND: Kind = Kind::F64;
    type Magnitude = u32;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_f32().to_bits() & 0x7FFF_FFFF
    }

    #[inline(always)]
    fn sign_bit(self) -> bool {
        self.is_sign_negative()
    }

    #[inline(always)]
    fn magnitude_bits(magnitude: u32) -> u32 {
        magnitude
    }
}
impl HighPrecision for f64 {
    #[inline(always)]
    fn to_f32(self) -> f32 {
        // For NaN too, whose sign the conversion leaves open.
        (self as f32).copysign(if self.is_sign_negative() { -1.0 } else { 1.0 })
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value.into()
    }
}
