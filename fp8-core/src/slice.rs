//! Casts over slices with one scale, and the element types that they read and write.

use half::{bf16, f16};

use crate::{Cast, Format, ScaleGrid, kernels::convert, rows};

pub(crate) mod sealed {
    /// Which type it is: a constant that code for one of them is chosen by.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Kind {
        F32,
        Bf16,
        F16,
        F64,
    }

    pub trait Sealed {
        const KIND: Kind;

        /// |x| as an integer that orders as its value does, NaN above infinity.
        type Magnitude: Copy + Default + Ord;

        fn magnitude(self) -> Self::Magnitude;

        /// The sign bit.
        fn is_negative(self) -> bool;

        /// The bits of the f32 of the same value.
        fn magnitude_bits(magnitude: Self::Magnitude) -> u32;
    }
}

use sealed::Kind;

/// A type to cast from and to: f32, bf16, f16 or f64. Sealed.
///
/// All arithmetic is in f32. bf16 and f16 are exact in it; an f64 is first rounded to the nearest f32.
pub trait HighPrecision: Copy + Default + Send + Sync + 'static + sealed::Sealed {
    /// The value in f32, on which everything is computed.
    fn to_f32(self) -> f32;

    /// The value nearest to `value`, ties to even.
    fn from_f32(value: f32) -> Self;
}

impl sealed::Sealed for f32 {
    const KIND: Kind = Kind::F32;
    type Magnitude = u32;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_f32().to_bits() & 0x7FFF_FFFF
    }

    #[inline(always)]
    fn is_negative(self) -> bool {
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
    // Signed: the baseline of x86-64 has the maximum of signed words only.
    type Magnitude = i16;

    #[inline(always)]
    fn magnitude(self) -> i16 {
        (self.to_bits() & 0x7FFF) as i16
    }

    #[inline(always)]
    fn is_negative(self) -> bool {
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
    // Signed: the baseline of x86-64 has the maximum of signed words only.
    type Magnitude = i16;

    #[inline(always)]
    fn magnitude(self) -> i16 {
        (self.to_bits() & 0x7FFF) as i16
    }

    #[inline(always)]
    fn is_negative(self) -> bool {
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
}

impl sealed::Sealed for f64 {
    const KIND: Kind = Kind::F64;
    type Magnitude = u32;

    #[inline(always)]
    fn magnitude(self) -> u32 {
        self.to_f32().to_bits() & 0x7FFF_FFFF
    }

    #[inline(always)]
    fn is_negative(self) -> bool {
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
        // Also of a NaN, whose sign the conversion leaves open.
        (self as f32).copysign(if self.is_sign_negative() { -1.0 } else { 1.0 })
    }

    #[inline(always)]
    fn from_f32(value: f32) -> Self {
        value.into()
    }
}

/// max |x| over `src` in f32, 0 where it is empty. A NaN anywhere gives NaN, else an infinity gives infinity.
pub fn amax<T: HighPrecision>(src: &[T]) -> f32 {
    let mut out = [0.0];
    rows::amax_rows(src, 0, &row(src.len()), &mut out);
    out[0]
}

/// The codes of `x * quant_scale` for each `x` of `src`; elements are numbered from 0 for stochastic rounding.
///
/// # Panics
/// Where `src` and `dst` differ in length.
pub fn encode<T: HighPrecision>(cast: &Cast, src: &[T], quant_scale: f32, dst: &mut [u8]) {
    rows::encode_rows(cast, src, 0, &row(src.len()), &[quant_scale], dst);
}

/// [`encode`], and the [`amax`] of `src` (without the scale) from the same pass.
///
/// # Panics
/// Where `src` and `dst` differ in length.
pub fn encode_with_amax<T: HighPrecision>(
    cast: &Cast,
    src: &[T],
    quant_scale: f32,
    dst: &mut [u8],
) -> f32 {
    rows::encode_rows_with_amax(cast, src, 0, &row(src.len()), &[quant_scale], dst)
}

/// `value * dequant_scale` for each code, in f32, then rounded to `T`.
///
/// # Panics
/// Where `codes` and `dst` differ in length.
pub fn decode<T: HighPrecision>(format: Format, codes: &[u8], dequant_scale: f32, dst: &mut [T]) {
    rows::decode_rows(format, codes, 0, &row(codes.len()), &[dequant_scale], dst);
}

fn row(len: usize) -> ScaleGrid {
    ScaleGrid::tensorwise(1, len)
}
