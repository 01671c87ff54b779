//! Packing to f32: codes in the order of `layout.rs`, decoded by vectors of AVX2, which every level of x86-64 with
//! kernels has.
//!
//! E4M3 and E5M2 are read as f16: with its exponent and mantissa moved into place, an E5M2 code is the upper byte of its f16, and
//! an E4M3 code is that of an f16 which is 2^8 times smaller. So the processor's conversion handles subnormals, and it is exact.

use super::kernel::Matrix;
use super::layout::DEPTH;
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

/// Calls `$function` for this format, whose number is its parameter.
macro_rules! by_format {
    ($format:expr, $function:ident, $arguments:tt) => {
        match $format {
            Format::E4M3 => $function::<{ Format::E4M3 as usize }> $arguments,
            Format::E5M2 => $function::<{ Format::E5M2 as usize }> $arguments,
            Format::E4M3Fnuz => $function::<{ Format::E4M3Fnuz as usize }> $arguments,
            Format::E5M2Fnuz => $function::<{ Format::E5M2Fnuz as usize }> $arguments,
        }
    };
}

/// Sixteen codes of format number `F`, decoded.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode<const F: usize>(codes: __m128i) -> [__m256; 2] {
    const E4M3: usize = Format::E4M3 as usize;
    const E5M2: usize = Format::E5M2 as usize;
    match F {
        E4M3 => {
            // The sign is in bits 7 to 15; bit 14 would belong to the exponent.
            let words = _mm256_cvtepi8_epi16(codes);
            let halves =
                _mm256_and_si256(_mm256_slli_epi16::<7>(words), _mm256_set1_epi16(!0x4000));
            let magnitude = _mm256_slli_epi16::<9>(words);
            let nan = _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x7F << 9));
            let values = packed_avx2::converted(_mm256_or_si256(halves, nan));
            let factor = _mm256_set1_ps(256.);
            values.map(|values| _mm256_mul_ps(values, factor))
        }
        E5M2 => packed_avx2::converted(_mm256_slli_epi16::<8>(_mm256_cvtepi8_epi16(codes))),
        _ => {
            let (mut bytes, mut values) = ([0u8; 16], [0f32; 16]);
            // SAFETY: sixteen bytes.
            unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), codes) };
            for (value, code) in values.iter_mut().zip(bytes) {
                *value = VALUES[F][usize::from(code)];
            }
            let from = values.as_ptr();
            // SAFETY: two vectors of eight values.
            unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
        }
    }
}

/// The first eight or sixteen codes, and zeros after the last.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load<const N: usize>(codes: &[u8]) -> __m128i {
    const { assert!(N == 8 || N == 16) };
    let mut bytes = [0; N];
    let codes: &[u8; N] = match codes.first_chunk() {
        Some(codes) => codes,
        None => {
            bytes[..codes.len()].copy_from_slice(codes);
            &bytes
        }
    };
    // SAFETY: so many bytes.
    unsafe {
        match N {
            8 => _mm_loadl_epi64(codes.as_ptr().cast()),
            _ => _mm_loadu_si128(codes.as_ptr().cast()),
        }
    }
}

/// The codes of each row from `first` on.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn vectors<const N: usize>(rows: &[&[u8]; N], first: usize) -> [__m128i; N] {
    let mut vectors = [_mm_setzero_si128(); N];
    for (vector, row) in vectors.iter_mut().zip(rows) {
        *vector = load::<16>(&row[first..]);
    }
    vectors
}

/// Stores values to the first sixteen places.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn store([low, high]: [__m256; 2], to: &mut [f32]) {
    let to: &mut [f32; 16] = to.first_chunk_mut().expect("place for two vectors");
    // SAFETY: two vectors of eight values.
    unsafe {
        _mm256_storeu_ps(to.as_mut_ptr(), low);
        _mm256_storeu_ps(to.as_mut_ptr().add(8), high);
    }
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

/// Packs one tile of A: kept indices `rows`, `range` of the sum, `[range][rows]`, and zeros for the padding of the sum. `dst` has room
/// for [`DEPTH`] more indices of the sum; part of that room is overwritten.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile(
    format: Format,
    matrix: Matrix<'_>,
    rows: Range<usize>,
    range: Range<usize>,
    dst: &mut [f32],
) {
    let (height, len) = (rows.len(), range.len());
    by_format!(format, tile_as, (matrix, rows, range, dst));
    dst[len * height..len.next_multiple_of(DEPTH) * height].fill(0.);
}

/// [`tile`] without the padding.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn tile_as<const F: usize>(
    matrix: Matrix<'_>,
    rows: Range<usize>,
    range: Range<usize>,
    dst: &mut [f32],
) {
    let (height, len) = (rows.len(), range.len());
    // Each vector may end after the last row; the next one overwrites what it has written there.
    assert!((1..=MOST_ROWS).contains(&height) && dst.len() >= (len + DEPTH) * height);
    let to = dst.as_mut_ptr();
    let line = |row: usize| {
        let start = matrix.place(rows.start + row.min(height - 1), range.start);
        &matrix.elements[start..start + len]
    };
    let row = |k: usize| &matrix.elements[matrix.place(rows.start, range.start + k)..];
    // Values of two indices of the sum, or of one.
    let two = |k: usize, codes: __m128i| {
        let [even, odd] = decode::<F>(codes);
        // SAFETY: `k + 1` is at most `len + 14`, and `height` from 1 to 8: the last of these eight values lies within
        // `(len + DEPTH) * height`.
        unsafe {
            _mm256_storeu_ps(to.add(k * height), even);
            _mm256_storeu_ps(to.add((k + 1) * height), odd);
        }
    };
    let one = |k: usize, codes: __m128i| {
        let [low, high] = decode::<F>(codes);
        // SAFETY: `k` is at most `len + 14`, and `height` at least 9: as above, for sixteen values.
        unsafe {
            _mm256_storeu_ps(to.add(k * height), low);
            _mm256_storeu_ps(to.add(k * height + 8), high);
        }
    };
    match (matrix.contraction, height) {
        (Contraction::Cols, ..=8) => {
            let lines: [&[u8]; 8] = std::array::from_fn(line);
            for first in (0..len).step_by(16) {
                for (pair, codes) in transpose(vectors(&lines, first)).into_iter().enumerate() {
                    two(first + 2 * pair, codes);
                }
            }
        }
        (Contraction::Cols, _) => {
            let lines: [&[u8]; 16] = std::array::from_fn(line);
            for first in (0..len).step_by(16) {
                for (k, codes) in transpose(vectors(&lines, first)).into_iter().enumerate() {
                    one(first + k, codes);
                }
            }
        }
        (Contraction::Rows, ..=8) => {
            for k in (0..len - len % 2).step_by(2) {
                let [even, odd] = [load::<8>(row(k)), load::<8>(row(k + 1))];
                two(k, _mm_unpacklo_epi64(even, odd));
            }
            if len % 2 == 1 {
                two(len - 1, load::<8>(row(len - 1)));
            }
        }
        (Contraction::Rows, _) => {
            for k in 0..len {
                one(k, load::<16>(row(k)));
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
    by_format!(format, rows_as, (matrix, cols, rows, width, dst));
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn rows_as<const F: usize>(
    matrix: Matrix<'_>,
    cols: Range<usize>,
    rows: Range<usize>,
    width: usize,
    dst: &mut [f32],
) {
    for (row, dst) in rows.zip(dst.chunks_exact_mut(width)) {
        let codes = &matrix.elements[matrix.place(cols.start, row)..][..cols.len()];
        for first in (0..width).step_by(16) {
            let values = decode::<F>(load::<16>(&codes[first.min(codes.len())..]));
            store(values, &mut dst[first..]);
        }
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
    by_format!(format, cols_as, (matrix, cols, rows, width, dst));
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn cols_as<const F: usize>(
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
                store(decode::<F>(codes), &mut dst[row * width + first_col..]);
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
