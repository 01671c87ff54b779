//! Casts over slices with one scale.

use crate::{Cast, Format, ScaleGrid, high_precision::HighPrecision, rows};

/// max |x| over `src` in f32, 0 if it is empty. A NaN anywhere gives NaN, otherwise an infinity gives infinity.
///
/// ```
/// use fp8_core::amax;
/// assert_eq!(amax(&[0.5f32, -3.0, 1.0]), 3.0);
/// assert!(amax(&[1.0, f32::NAN]).is_nan());
/// ```
pub fn amax<T: HighPrecision>(src: &[T]) -> f32 {
    let mut out = [0.0];
    rows::amax_rows(src, 0, &row(src.len()), &mut out);
    out[0]
}

/// The codes of `x * quant_scale` for each `x` of `src`; elements are numbered from 0 for stochastic rounding.
///
/// ```
/// use fp8_core::{Cast, Format, encode};
/// let mut codes = [0; 3];
/// encode(&Cast::new(Format::E4M3), &[0.5f32, -1.0, 1e9], 2.0, &mut codes);
/// assert_eq!(codes, [0x38, 0xC0, 0x7E]); // 1, -2, and what is too large is 448
/// ```
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn encode<T: HighPrecision>(cast: &Cast, src: &[T], quant_scale: f32, dst: &mut [u8]) {
    rows::encode_rows(cast, src, 0, &row(src.len()), &[quant_scale], dst);
}

/// [`encode`], and the [`amax`] of `src` (without the scale) from the same pass.
///
/// ```
/// use fp8_core::{Cast, Format, encode_with_amax};
/// let mut codes = [0; 2];
/// let amax = encode_with_amax(&Cast::new(Format::E5M2), &[0.5f32, -1.0], 2.0, &mut codes);
/// assert_eq!((codes, amax), ([0x3C, 0xC0], 1.0));
/// ```
///
/// # Panics
/// If `src` and `dst` differ in length.
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
/// ```
/// use fp8_core::{Format, decode};
/// let mut values = [0f32; 3];
/// decode(Format::E4M3, &[0x38, 0xC0, 0x7E], 0.5, &mut values);
/// assert_eq!(values, [0.5, -1.0, 224.0]);
/// ```
///
/// # Panics
/// If `codes` and `dst` differ in length.
pub fn decode<T: HighPrecision>(format: Format, codes: &[u8], dequant_scale: f32, dst: &mut [T]) {
    rows::decode_rows(format, codes, 0, &row(codes.len()), &[dequant_scale], dst);
}

fn row(len: usize) -> ScaleGrid {
    ScaleGrid::tensorwise(1, len)
}
