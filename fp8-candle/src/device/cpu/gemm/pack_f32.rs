//! Packing to f32: codes in the order of `layout.rs`, decoded by vectors of AVX2, which every level of x86-64 with
//! kernels has.
//!
//! E4M3 and E5M2 are read as f16: with its exponent and mantissa moved into place, an E5M2 code is the upper byte of its f16, and
//! an E4M3 code is that of an f16 which is 2^8 times smaller. So the processor's conversion handles subnormals, and it is exact.

use super::kernel::Matrix;
use super::layout::{DEPTH, SLICE};
use super::packed_avx2;
use super::packed_f32::{self, Route};
use fp8_core::{Contraction, Format};
use std::arch::x86_64::*;
use std::ops::Range;

/// The values of all codes of each format.
static VALUES: [[f32; 256]; Format::ALL.len()] = {
    let mut values = [[0.; 256]; Format::ALL.len()];
    let mut index = 0;
    while index < Format::ALL.len() {
        let format = Format::ALL[index];
        let mut code = 0;
        while code < 256 {
            values[format as usize][code] = format.decode(code as u8);
            code += 1;
        }
        index += 1;
    }
    values
};

/// Sixteen codes of E4M3 or E5M2, decoded.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_16_as<const E5M2: bool>(codes: __m128i, dst: &mut [f32; 16]) {
    let words = _mm256_cvtepi8_epi16(codes);
    let halves = if E5M2 {
        _mm256_slli_epi16::<8>(words)
    } else {
        // The sign is in bits 7 to 15; bit 14 would belong to the exponent.
        let halves = _mm256_and_si256(_mm256_slli_epi16::<7>(words), _mm256_set1_epi16(!0x4000));
        let magnitude = _mm256_slli_epi16::<9>(words);
        let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F << 9));
        _mm256_or_si256(halves, nan)
    };
    let mut low = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
    let mut high = _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves));
    if !E5M2 {
        let factor = _mm256_set1_ps(256.);
        (low, high) = (_mm256_mul_ps(low, factor), _mm256_mul_ps(high, factor));
    }
    let to = dst.as_mut_ptr();
    // SAFETY: `dst` is two vectors of eight values.
    unsafe {
        _mm256_storeu_ps(to, low);
        _mm256_storeu_ps(to.add(8), high);
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(codes: &[u8; 16]) -> __m128i {
    // SAFETY: sixteen bytes.
    unsafe { _mm_loadu_si128(codes.as_ptr().cast()) }
}

/// Up to sixteen codes, and zeros after them.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_some(codes: &[u8]) -> __m128i {
    match codes.first_chunk() {
        Some(codes) => load(codes),
        None => {
            let mut bytes = [0; 16];
            bytes[..codes.len()].copy_from_slice(codes);
            load(&bytes)
        }
    }
}

/// The codes of each row from `first` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn vectors<const N: usize>(rows: &[&[u8]; N], first: usize) -> [__m128i; N] {
    let mut vectors = [_mm_setzero_si128(); N];
    for (vector, row) in vectors.iter_mut().zip(rows) {
        *vector = load_some(&row[first..]);
    }
    vectors
}

/// The first sixteen elements.
#[inline]
fn place<T>(to: &mut [T]) -> &mut [T; 16] {
    to.first_chunk_mut().expect("place for a vector")
}

/// The first eight codes.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store_8(codes: __m128i, to: &mut [u8]) {
    let to: &mut [u8; 8] = to.first_chunk_mut().expect("place for half a vector");
    // SAFETY: eight bytes.
    unsafe { _mm_storel_epi64(to.as_mut_ptr().cast(), codes) };
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store(codes: __m128i, bytes: &mut [u8; 16]) {
    // SAFETY: sixteen bytes.
    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), codes) };
}

/// Sixteen codes, decoded.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_16(format: Format, codes: __m128i, dst: &mut [f32; 16]) {
    match format {
        Format::E4M3 => decode_16_as::<false>(codes, dst),
        Format::E5M2 => decode_16_as::<true>(codes, dst),
        Format::E4M3Fnuz | Format::E5M2Fnuz => {
            let mut bytes = [0; 16];
            store(codes, &mut bytes);
            look_up(format, &bytes, dst);
        }
    }
}

/// Decodes codes by the table of all values.
#[inline]
fn look_up(format: Format, codes: &[u8], dst: &mut [f32]) {
    let values = &VALUES[format as usize];
    for (dst, &code) in dst.iter_mut().zip(codes) {
        *dst = values[usize::from(code)];
    }
}

/// Decodes codes that are in order already.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode(format: Format, codes: &[u8], dst: &mut [f32]) {
    let dst = &mut dst[..codes.len()];
    match format {
        Format::E4M3 => decode_as::<false>(codes, dst),
        Format::E5M2 => decode_as::<true>(codes, dst),
        Format::E4M3Fnuz | Format::E5M2Fnuz => look_up(format, codes, dst),
    }
}

/// [`decode`] of E4M3 or E5M2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_as<const E5M2: bool>(codes: &[u8], dst: &mut [f32]) {
    let (codes, rest) = codes.as_chunks::<16>();
    let (dst, dst_rest) = dst.as_chunks_mut::<16>();
    for (codes, dst) in codes.iter().zip(dst) {
        decode_16_as::<E5M2>(load(codes), dst);
    }
    let format = if E5M2 { Format::E5M2 } else { Format::E4M3 };
    look_up(format, rest, dst_rest);
}

/// Decodes packed codes of panels of `width` columns, `[pairs][width][2]`, into values packed as B, `[sum][width]`.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode_panel(format: Format, packed: &[u8], width: usize, dst: &mut [f32]) {
    match format {
        Format::E4M3 => decode_panel_as::<false>(packed, width, dst),
        Format::E5M2 => decode_panel_as::<true>(packed, width, dst),
        Format::E4M3Fnuz | Format::E5M2Fnuz => unreachable!("{format} is not packed"),
    }
}

/// [`decode_panel`] of E5M2, or of E4M3 without NaN.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_panel_as<const E5M2: bool>(packed: &[u8], width: usize, dst: &mut [f32]) {
    let format = if E5M2 { Format::E5M2 } else { Format::E4M3 };
    let factor = _mm256_set1_ps(1. / packed_f32::factor(format, Route::Half));
    let pairs = packed.chunks_exact(2 * width);
    for (codes, dst) in pairs.zip(dst.chunks_exact_mut(2 * width)) {
        let (even, odd) = dst.split_at_mut(width);
        let (codes, _) = codes.as_chunks::<32>();
        let (even, _) = even.as_chunks_mut::<16>();
        let (odd, _) = odd.as_chunks_mut::<16>();
        for ((codes, even), odd) in codes.iter().zip(even).zip(odd) {
            // SAFETY: 32 bytes.
            let codes = unsafe { _mm256_loadu_si256(codes.as_ptr().cast()) };
            let values = packed_avx2::values::<E5M2, false>(codes);
            for (to, values) in [even, odd].into_iter().zip(values) {
                let to = to.as_mut_ptr();
                // SAFETY: two vectors of eight values.
                unsafe {
                    _mm256_storeu_ps(to, _mm256_mul_ps(values[0], factor));
                    _mm256_storeu_ps(to.add(8), _mm256_mul_ps(values[1], factor));
                }
            }
        }
    }
}

/// The most rows of a tile.
pub(super) const MOST_ROWS: usize = 12;

/// The codes of a tile of A in their order, and room for a vector after them.
pub(super) struct InOrder([u8; MOST_ROWS * SLICE + 16]);

impl Default for InOrder {
    fn default() -> Self {
        Self([0; MOST_ROWS * SLICE + 16])
    }
}

/// Packs one tile of A: kept indices `rows`, `range` of the sum, `[range][rows]`, and zeros for the padding of the sum.
/// `order` is overwritten.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile(
    format: Format,
    matrix: Matrix<'_>,
    rows: Range<usize>,
    range: Range<usize>,
    order: &mut InOrder,
    dst: &mut [f32],
) {
    let height = rows.len();
    let len = range.len() * height;
    let codes = &mut order.0;
    match matrix.contraction {
        Contraction::Rows => {
            // Each store overwrites what the one before has written beyond its `height` codes.
            for (k, index) in range.clone().enumerate() {
                let codes_of_k = &matrix.elements[matrix.place(rows.start, index)..];
                store(load_some(codes_of_k), place(&mut codes[k * height..]));
            }
        }
        Contraction::Cols => {
            let row = |index: usize| {
                let start = matrix.place(rows.start + index.min(height - 1), range.start);
                &matrix.elements[start..start + range.len()]
            };
            interleave(std::array::from_fn(row), height, codes);
        }
    }
    let end = range.len().next_multiple_of(DEPTH) * height;
    let (dst, rest) = dst[..end].split_at_mut(len);
    decode(format, &codes[..len], dst);
    rest.fill(0.);
}

/// The first `height` of these rows of codes, of one length, as `[sum][height]`. Up to fifteen bytes after the result are
/// overwritten.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn interleave(rows: [&[u8]; 16], height: usize, to: &mut [u8]) {
    let len = rows[0].len();
    // Each store overwrites what the one before has written beyond its `height` codes.
    if let (0..=8, Some(rows)) = (height, rows.first_chunk::<8>()) {
        for first in (0..len).step_by(16) {
            for (pair, codes) in transpose(vectors(rows, first)).into_iter().enumerate() {
                let k = first + 2 * pair;
                store_8(codes, &mut to[k * height..]);
                store_8(
                    _mm_unpackhi_epi64(codes, codes),
                    &mut to[(k + 1) * height..],
                );
            }
        }
    } else {
        for first in (0..len).step_by(16) {
            for (k, codes) in transpose(vectors(&rows, first)).into_iter().enumerate() {
                store(codes, place(&mut to[(first + k) * height..]));
            }
        }
    }
}

/// Packs a panel of a B that sums over its rows: `[rows][width]`; missing columns become 0.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn panel_of_rows(
    format: Format,
    matrix: Matrix<'_>,
    cols: Range<usize>,
    rows: Range<usize>,
    width: usize,
    dst: &mut [f32],
) {
    for (row, dst) in rows.zip(dst.chunks_exact_mut(width)) {
        let codes = &matrix.elements[matrix.place(cols.start, row)..][..cols.len()];
        decode(format, codes, &mut dst[..codes.len()]);
        dst[codes.len()..].fill(0.);
    }
}

/// Packs a panel of a B that sums over its columns: `[rows][width]`, where `rows` are indices of the sum. Missing columns
/// repeat the last one, as their sums are dropped.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn panel_of_cols(
    format: Format,
    matrix: Matrix<'_>,
    cols: Range<usize>,
    rows: Range<usize>,
    width: usize,
    dst: &mut [f32],
) {
    for first_col in (0..width).step_by(16) {
        let codes: [&[u8]; 16] = std::array::from_fn(|col| {
            let col = cols.start + (first_col + col).min(cols.len() - 1);
            let start = matrix.place(col, rows.start);
            &matrix.elements[start..start + rows.len()]
        });
        for first in (0..rows.len()).step_by(16) {
            let block = transpose(vectors(&codes, first));
            for (row, codes) in (first..rows.len()).zip(block) {
                decode_16(format, codes, place(&mut dst[row * width + first_col..]));
            }
        }
    }
}

/// A transposed block of `N` x 16 bytes: rounds that each interleave the rows of the first half with those of the second. With 8
/// rows, each vector has two columns.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose<const N: usize>(mut rows: [__m128i; N]) -> [__m128i; N] {
    for _ in 0..N.ilog2() {
        let mut next = rows;
        for i in 0..N / 2 {
            next[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + N / 2]);
            next[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + N / 2]);
        }
        rows = next;
    }
    rows
}
