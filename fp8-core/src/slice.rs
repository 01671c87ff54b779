//! Casts over slices with one scale.

use crate::{Cast, Format, ScaleGrid, high_precision::HighPrecision, rows};

/// max |x| over `src` in f32, 0 if it is empty. A NaN anywhere gives NaN, otherwise an infinity gives infinity.
pub fn amax<T: HighPrecision>(src: &[T]) -> f32 {
    let mut out = [0.0];
    rows::amax_rows(src, 0, &row(src.len()), &mut out);
    out[0]
}

/// The codes of `x * quant_scale` for each `x` of `src`; elements are numbered from 0 for stochastic rounding.
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn encode<T: HighPrecision>(cast: &Cast, src: &[T], quant_scale: f32, dst: &mut [u8]) {
    rows::encode_rows(cast, src, 0, &row(src.len()), &[quant_scale], dst);
}

/// [`encode`], and the [`amax`] of `src` (without the scale) from the same pass.
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
/// # Panics
/// If `codes` and `dst` differ in length.
pub fn decode<T: HighPrecision>(format: Format, codes: &[u8], dequant_scale: f32, dst: &mut [T]) {
    rows::decode_rows(format, codes, 0, &row(codes.len()), &[dequant_scale], dst);
}

fn row(len: usize) -> ScaleGrid {
    ScaleGrid::tensorwise(1, len)
}
