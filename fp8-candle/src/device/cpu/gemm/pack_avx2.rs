//! Packing for AVX2: codes in the order of `layout.rs`, decoded to f32.
//!
//! E4M3 and E5M2 are read as f16: with its exponent and mantissa moved into place, an E5M2 code is the upper byte of its f16, and
//! an E4M3 code is that of an f16 which is 2^8 times smaller. So the processor's conversion handles subnormals, and it is exact.

use super::engine_f32::VALUES;
use super::kernel::Matrix;
use super::layout::{DEPTH, NARROW_PANEL, SLICE};
use super::tile_avx2::ROWS;
use fp8_core::{Contraction, Format};
use std::arch::x86_64::*;
use std::ops::Range;

/// Eight codes in the low half of `codes`, decoded. `FORMAT` is E4M3 or E5M2.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_8<const E5M2: bool>(codes: __m128i) -> __m256 {
    if E5M2 {
        return _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), codes));
    }
    let words = _mm_cvtepi8_epi16(codes);
    // The sign is in bits 7 to 15: bit 14 would be an exponent.
    let halves = _mm_and_si128(_mm_slli_epi16::<7>(words), _mm_set1_epi16(!0x4000));
    let magnitude = _mm_and_si128(words, _mm_set1_epi16(0x7F));
    let nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7F));
    let values = _mm256_cvtph_ps(_mm_or_si128(halves, nan));
    _mm256_mul_ps(values, _mm256_set1_ps(256.))
}

/// Sixteen codes, decoded.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_16<const E5M2: bool>(codes: __m128i, dst: &mut [f32; 16]) {
    let high = _mm_unpackhi_epi64(codes, codes);
    let values = [decode_8::<E5M2>(codes), decode_8::<E5M2>(high)];
    let (chunks, _) = dst.as_chunks_mut::<8>();
    for (dst, values) in chunks.iter_mut().zip(values) {
        // SAFETY: `dst` is eight values.
        unsafe { _mm256_storeu_ps(dst.as_mut_ptr(), values) };
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load(codes: &[u8; 16]) -> __m128i {
    // SAFETY: sixteen bytes.
    unsafe { _mm_loadu_si128(codes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn load_8(codes: &[u8; 8]) -> __m128i {
    // SAFETY: eight bytes.
    unsafe { _mm_loadl_epi64(codes.as_ptr().cast()) }
}

/// Decodes codes that are in order already.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn decode(format: Format, codes: &[u8], dst: &mut [f32]) {
    match format {
        Format::E4M3 => decode_as::<false>(codes, dst),
        Format::E5M2 => decode_as::<true>(codes, dst),
        Format::E4M3Fnuz | Format::E5M2Fnuz => look_up(format, codes, dst),
    }
}

/// [`decode`] by the values of all codes.
#[inline]
fn look_up(format: Format, codes: &[u8], dst: &mut [f32]) {
    let values = &VALUES[format as usize];
    for (dst, &code) in dst.iter_mut().zip(codes) {
        *dst = values[usize::from(code)];
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn decode_as<const E5M2: bool>(codes: &[u8], dst: &mut [f32]) {
    let dst = &mut dst[..codes.len()];
    let (codes, rest) = codes.as_chunks::<16>();
    let (dst, dst_rest) = dst.as_chunks_mut::<16>();
    for (codes, dst) in codes.iter().zip(dst) {
        decode_16::<E5M2>(load(codes), dst);
    }
    let format = if E5M2 { Format::E5M2 } else { Format::E4M3 };
    look_up(format, rest, dst_rest);
}

/// Codes of a tile between two steps.
const BUFFER: usize = ROWS * SLICE;

/// Packs one tile of A: kept indices `rows`, `range` of the sum, `[range][rows]`, and zeros for the padding of the sum.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn tile(
    format: Format,
    matrix: Matrix<'_>,
    rows: Range<usize>,
    range: Range<usize>,
    dst: &mut [f32],
) {
    let height = rows.len();
    let mut buffer = [0u8; BUFFER];
    let codes = &mut buffer[..range.len() * height];
    match matrix.contraction {
        Contraction::Rows => {
            for (k, to) in range.clone().zip(codes.chunks_exact_mut(height)) {
                to.copy_from_slice(&matrix.codes[matrix.place(rows.start, k)..][..height]);
            }
        }
        Contraction::Cols => {
            let row = |index: usize| {
                let start = matrix.place(rows.start + index, range.start);
                &matrix.codes[start..start + range.len()]
            };
            if height == ROWS {
                interleave([row(0), row(1), row(2), row(3), row(4), row(5)], codes);
            } else {
                for index in 0..height {
                    let to = codes[index..].iter_mut().step_by(height);
                    to.zip(row(index)).for_each(|(to, &code)| *to = code);
                }
            }
        }
    }
    let end = range.len().next_multiple_of(DEPTH) * height;
    let (dst, rest) = dst[..end].split_at_mut(codes.len());
    decode(format, codes, dst);
    rest.fill(0.);
}

/// Byte `to` of 48 interleaved ones comes from this byte of the vectors `[left, right, last]` below, or from none (0x80).
const fn shuffle(part: usize, source: usize) -> [u8; 16] {
    let mut bytes = [0x80; 16];
    let mut at = 0;
    while at < 16 {
        let (k, row) = ((16 * part + at) / ROWS, (16 * part + at) % ROWS);
        // left: four rows of sums 0 to 3, right: of sums 4 to 7, last: two rows of all eight.
        let (from, byte) = match (row < 4, k < 4) {
            (true, true) => (0, 4 * k + row),
            (true, false) => (1, 4 * (k - 4) + row),
            (false, _) => (2, 2 * k + row - 4),
        };
        if from == source {
            bytes[at] = byte as u8;
        }
        at += 1;
    }
    bytes
}

/// Six rows of codes as `[sum][ROWS]`.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn interleave(rows: [&[u8]; ROWS], to: &mut [u8]) {
    const SHUFFLES: [[[u8; 16]; 3]; 3] = {
        let mut shuffles = [[[0; 16]; 3]; 3];
        let mut part = 0;
        while part < 3 {
            let mut source = 0;
            while source < 3 {
                shuffles[part][source] = shuffle(part, source);
                source += 1;
            }
            part += 1;
        }
        shuffles
    };
    let [a, b, c, d, e, f] = rows.map(|row| row.as_chunks::<8>().0);
    let (chunks, rest) = to.as_chunks_mut::<{ 8 * ROWS }>();
    for (index, to) in chunks.iter_mut().enumerate() {
        let pair = |left: &[[u8; 8]], right: &[[u8; 8]]| {
            _mm_unpacklo_epi8(load_8(&left[index]), load_8(&right[index]))
        };
        let (first, second, last) = (pair(a, b), pair(c, d), pair(e, f));
        let left = _mm_unpacklo_epi16(first, second);
        let right = _mm_unpackhi_epi16(first, second);
        let (parts, _) = to.as_chunks_mut::<16>();
        for (to, shuffles) in parts.iter_mut().zip(&SHUFFLES) {
            let [left, right, last] = [
                _mm_shuffle_epi8(left, load(&shuffles[0])),
                _mm_shuffle_epi8(right, load(&shuffles[1])),
                _mm_shuffle_epi8(last, load(&shuffles[2])),
            ];
            let bytes = _mm_or_si128(_mm_or_si128(left, right), last);
            // SAFETY: `to` is sixteen bytes.
            unsafe { _mm_storeu_si128(to.as_mut_ptr().cast(), bytes) };
        }
    }
    let done = chunks.len() * 8;
    for (index, row) in rows.iter().enumerate() {
        let to = rest.iter_mut().skip(index).step_by(ROWS);
        to.zip(&row[done..]).for_each(|(to, &code)| *to = code);
    }
}

/// Packs a panel of a B that sums over its rows: `[rows][NARROW_PANEL]`; columns that do not exist become 0.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn panel_of_rows(
    format: Format,
    matrix: Matrix<'_>,
    cols: Range<usize>,
    rows: Range<usize>,
    dst: &mut [f32],
) {
    let (dst, _) = dst.as_chunks_mut::<NARROW_PANEL>();
    for (row, dst) in rows.zip(dst) {
        let codes = &matrix.codes[matrix.place(cols.start, row)..][..cols.len()];
        match (format, codes.first_chunk()) {
            (Format::E4M3, Some(codes)) => decode_16::<false>(load(codes), dst),
            (Format::E5M2, Some(codes)) => decode_16::<true>(load(codes), dst),
            _ => {
                look_up(format, codes, dst);
                dst[codes.len()..].fill(0.);
            }
        }
    }
}

/// Packs a panel of a B that sums over its columns: `[rows][NARROW_PANEL]`, where `rows` are indices of the sum; columns that do
/// not exist get the values of another, as their sums are dropped.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) fn panel_of_cols(
    format: Format,
    matrix: Matrix<'_>,
    cols: Range<usize>,
    rows: Range<usize>,
    dst: &mut [f32],
) {
    let codes: [&[u8]; NARROW_PANEL] = std::array::from_fn(|col| {
        let col = if col < cols.len() { col } else { 0 };
        let start = matrix.place(cols.start + col, rows.start);
        &matrix.codes[start..start + rows.len()]
    });
    let (chunks, _) = dst.as_chunks_mut::<{ 16 * NARROW_PANEL }>();
    let whole = chunks.len();
    for (index, dst) in chunks.iter_mut().enumerate() {
        let mut block = [_mm_setzero_si128(); 16];
        for (to, codes) in block.iter_mut().zip(codes) {
            let codes = codes[16 * index..].first_chunk();
            *to = load(codes.expect("a chunk of the sum is a chunk of each column"));
        }
        let (dst, _) = dst.as_chunks_mut::<NARROW_PANEL>();
        for (dst, codes) in dst.iter_mut().zip(transpose(block)) {
            match format {
                Format::E4M3 => decode_16::<false>(codes, dst),
                Format::E5M2 => decode_16::<true>(codes, dst),
                Format::E4M3Fnuz | Format::E5M2Fnuz => {
                    let mut bytes = [0; 16];
                    // SAFETY: sixteen bytes.
                    unsafe { _mm_storeu_si128(bytes.as_mut_ptr().cast(), codes) };
                    look_up(format, &bytes, dst);
                }
            }
        }
    }
    let values = &VALUES[format as usize];
    let (dst, _) = dst.as_chunks_mut::<NARROW_PANEL>();
    for (row, dst) in dst.iter_mut().enumerate().skip(16 * whole) {
        for (dst, codes) in dst.iter_mut().zip(codes) {
            *dst = values[usize::from(codes[row])];
        }
    }
}

/// A transposed block of 16 x 16 bytes: four rounds that each interleave the rows of the first half with those of the second.
#[inline]
#[target_feature(enable = "avx2,fma,f16c")]
fn transpose(mut rows: [__m128i; 16]) -> [__m128i; 16] {
    for _ in 0..4 {
        let mut next = rows;
        for i in 0..8 {
            next[2 * i] = _mm_unpacklo_epi8(rows[i], rows[i + 8]);
            next[2 * i + 1] = _mm_unpackhi_epi8(rows[i], rows[i + 8]);
        }
        rows = next;
    }
    rows
}
