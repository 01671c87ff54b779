//! The element types that casts read and write.

use half::{bf16, f16};

use crate::kernels::{self, convert};

pub(crate) mod sealed {
    /// Which type it is: a constant by which code for one of them is chosen.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        F32,
        Bf16,
        F16,
        F64,
    }

    pub trait Sealed {
        const KIND: Kind;

        /// |x| as an integer in the order of the values, with NaN above infinity.
        type Magnitude: Copy + Default + Ord;

        fn magnitude(self) -> Self::Magnitude;

        /// The sign bit.
        fn sign_bit(self) -> bool;

        /// The bits of the f32 of the same value.
        fn magnitude_bits(magnitude: Self::Magnitude) -> u32;
    }
}

use sealed::Kind;

/// A type to cast from and to: f32, bf16, f16 or f64. Sealed.
///
/// All arithmetic is in f32. bf16 and f16 are exact in it; an f64 is first rounded to the nearest f32.
pub trait HighPrecision: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// The value in f32, in which everything is computed.
    fn to_f32(self) -> f32;

    /// The value nearest to `value`, ties to even.
    fn from_f32(value: f32) -> Self;

    /// [`HighPrecision::from_f32`] of each value, as many as both slices have; the bits of a NaN may differ.
    ///
    /// ```
    /// use fp8_core::HighPrecision;
    /// use half::f16;
    /// let mut halves = [f16::ZERO; 2];
    /// f16::narrow(&[1.0, 1e-3], &mut halves);
    /// assert_eq!(halves, [f16::ONE, f16::from_f32(1e-3)]);
    /// ```
    #[inline(always)]
    fn narrow(values: &[f32], narrowed: &mut [Self]) {
        for (narrowed, &value) in narrowed.iter_mut().zip(values) {
            *narrowed = Self::from_f32(value);
        }
    }
}

/// [`HighPrecision::to_f32`] of each value, as many as both slices have; the bits of a NaN may differ.
///
/// ```
/// use half::f16;
/// let mut wide = [0.0; 2];
/// fp8_core::widen(&[f16::ONE, f16::MAX], &mut wide);
/// assert_eq!(wide, [1.0, 65504.0]);
/// ```
pub fn widen<T: HighPrecision>(values: &[T], widened: &mut [f32]) {
    kernels::halves::widen(kernels::Isa::best(), values, widened);
}

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
