//! Casts over slices: FP8 with one scale, and the 16-bit types.

use crate::high_precision::sealed::Kind;
use crate::kernels::general;
use crate::{Cast, Format, HalfPrecision, HighPrecision, ScaleGrid, StochasticKey, kernels, rows};

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

/// The codes of `x * quant_scale` for each `x` of `src`; elements are numbered from 0 for stochastic rounding. If the cast
/// [divides](Cast::divides), `quant_scale` is a dequant_scale, and the codes are those of `x / dequant_scale`.
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

/// [`HighPrecision::to_f32`] of each value, as many as both slices have; the bits of a NaN may differ.
pub fn widen<T: HighPrecision>(values: &[T], widened: &mut [f32]) {
    kernels::halves::widen(kernels::Isa::best(), values, widened);
}

/// [`HighPrecision::from_f32`] of each value, as many as both slices have; the bits of a NaN may differ.
pub fn narrow<T: HighPrecision>(values: &[f32], narrowed: &mut [T]) {
    match T::KIND {
        Kind::F16 => T::narrow(values, narrowed),
        _ => kernels::halves::narrow_each(kernels::Isa::best(), values, narrowed),
    }
}

/// Rounds `src` to 16 bits at random, so that the mean is the value itself: [`HalfPrecision::from_f32_stochastic`] with the words
/// of `key`, for elements numbered from `first_element` on. A tensor may be split anywhere: every split gives the same bits.
///
/// ```
/// use fp8_core::{StochasticKey, stochastic_round};
/// use half::f16;
/// let key = StochasticKey { seed: 7, step: 1, tensor: 0 };
/// let values = [1.0f32, 1.0001, 1e9, -0.0];
/// let mut rounded = [f16::ZERO; 4];
/// stochastic_round(key, 0, &values, &mut rounded);
/// assert_eq!((rounded[0], rounded[2]), (f16::ONE, f16::INFINITY));
/// assert!(rounded[1] == f16::ONE || rounded[1] == f16::ONE + f16::EPSILON);
///
/// let mut tail = [f16::ZERO; 3];
/// stochastic_round(key, 1, &values[1..], &mut tail);
/// assert_eq!(tail, rounded[1..]);
/// ```
///
/// # Panics
/// If `src` and `dst` differ in length.
pub fn stochastic_round<T: HalfPrecision>(
    key: StochasticKey,
    first_element: u64,
    src: &[f32],
    dst: &mut [T],
) {
    assert_eq!(src.len(), dst.len(), "source and destination");
    let isa = kernels::Isa::best();
    kernels::stochastic::round(isa, key, first_element, src, dst);
}

/// [`StochasticKey::word`] of each element from `first_element` on.
///
/// ```
/// use fp8_core::{StochasticKey, random_words};
/// let key = StochasticKey { seed: 7, step: 1, tensor: 0 };
/// let mut words = [0; 9];
/// random_words(key, 2, &mut words);
/// assert_eq!(words[8], key.word(10));
/// ```
pub fn random_words(key: StochasticKey, first_element: u64, words: &mut [u32]) {
    let (isa, skip) = (kernels::Isa::best(), (first_element % 4) as usize);
    if skip == 0 {
        return general::random_words(isa, key, first_element / 4, words);
    }
    let mut drawn: general::Words = [0; general::CHUNK + 4];
    for (index, words) in words.chunks_mut(general::CHUNK).enumerate() {
        let first = first_element.wrapping_add((index * general::CHUNK) as u64);
        let drawn = &mut drawn[..skip + words.len()];
        general::random_words(isa, key, first / 4, drawn);
        words.copy_from_slice(&drawn[skip..]);
    }
}

fn row(len: usize) -> ScaleGrid {
    ScaleGrid::tensorwise(1, len)
}
