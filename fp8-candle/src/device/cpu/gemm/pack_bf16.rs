//! From codes, or from values in bf16, to panels of bf16, with AVX-512 VBMI. Every FP8 value is exact in bf16; the layouts are those
//! of `layout.rs`.

use super::decoder::{Decoder, added_to_pairs, load, prefetch};
use super::kernel::Matrix;
#[cfg(doc)]
use super::kernel::PackedPanel;
use super::layout::{DEPTH, PANEL, ROWS, ROWS_STEP, SLICE, SLICE_STRIDE, padded};
use super::tile_bf16;
use crate::base::parallel::shared::Shared;
use fp8_core::Contraction;
use std::arch::x86_64::*;
use std::ops::Range;

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn store(values: __m512i, dst: &mut [u16]) {
    let dst: &mut [u16; 32] = dst.first_chunk_mut().expect("room for a vector");
    // SAFETY: 32 elements of 16 bits are the 64 bytes of the vector.
    unsafe { _mm512_storeu_si512(dst.as_mut_ptr().cast(), values) }
}

/// The 16x16 matrix of 32-bit elements, transposed.
#[inline]
#[target_feature(enable = "avx512f")]
pub(in super::super) fn transpose_16(rows: [__m512i; 16]) -> [__m512i; 16] {
    let (mut twos, mut fours, mut out) = (rows, rows, rows);
    for i in (0..16).step_by(2) {
        twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for i in (0..16).step_by(4) {
        fours[i] = _mm512_unpacklo_epi64(twos[i], twos[i + 2]);
        fours[i + 1] = _mm512_unpackhi_epi64(twos[i], twos[i + 2]);
        fours[i + 2] = _mm512_unpacklo_epi64(twos[i + 1], twos[i + 3]);
        fours[i + 3] = _mm512_unpackhi_epi64(twos[i + 1], twos[i + 3]);
    }
    // Lane l of fours[4 i + c] holds column 4 l + c of rows 4 i to 4 i + 3.
    for c in 0..4 {
        let even = [
            _mm512_shuffle_i32x4::<0x88>(fours[c], fours[4 + c]),
            _mm512_shuffle_i32x4::<0x88>(fours[8 + c], fours[12 + c]),
        ];
        let odd = [
            _mm512_shuffle_i32x4::<0xDD>(fours[c], fours[4 + c]),
            _mm512_shuffle_i32x4::<0xDD>(fours[8 + c], fours[12 + c]),
        ];
        out[c] = _mm512_shuffle_i32x4::<0x88>(even[0], even[1]);
        out[4 + c] = _mm512_shuffle_i32x4::<0x88>(odd[0], odd[1]);
        out[8 + c] = _mm512_shuffle_i32x4::<0xDD>(even[0], even[1]);
        out[12 + c] = _mm512_shuffle_i32x4::<0xDD>(odd[0], odd[1]);
    }
    out
}

/// How elements in memory become vectors of bf16.
///
/// # Safety of all functions
/// The processor must have the instructions of this file.
pub(super) trait Source: Copy {
    type Element: Copy;

    /// The first 64 elements of `row`, zeros after its end.
    unsafe fn run(self, row: &[Self::Element]) -> [__m512i; 2];

    /// Rows `k` and `k + 1` of a matrix that sums over rows, side by side in each column: `left` columns from `col` on, and up to as
    /// many, and up to 16, after them. Other lanes have any values, lanes behind the matrix zeros.
    unsafe fn pairs(
        self,
        matrix: Matrix<'_, Self::Element>,
        k: usize,
        col: usize,
        left: usize,
    ) -> [__m512i; 2];

    /// Two rows side by side in each of 32 columns.
    unsafe fn whole_pair(self, rows: [&[Self::Element; PANEL]; 2]) -> [__m512i; 2];

    /// [`pack_b`] of a matrix that sums over columns.
    unsafe fn panel_of_cols(
        self,
        matrix: Matrix<'_, Self::Element>,
        first: usize,
        range: Range<usize>,
        dst: &mut [u16],
    );
}

/// Packs kept indices `rows` of `matrix` as A; `first` is the kept index of the first packed row.
///
/// # Safety
/// No other task may use these rows of `dst` at the same time. `rows.start - first` is a multiple of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) unsafe fn pack_a<S: Source>(
    source: S,
    matrix: Matrix<'_, S::Element>,
    rows: Range<usize>,
    first: usize,
    padded_rows: usize,
    dst: Shared<'_, u16>,
) {
    let k = matrix.contracted;
    let row_of = |slice: usize, row: usize| {
        let start = (slice * padded_rows + row - first) * SLICE_STRIDE;
        // SAFETY: the caller guarantees that only this call uses these rows; it uses one at a time.
        unsafe { dst.part(start..start + SLICE_STRIDE) }
    };
    match matrix.contraction {
        Contraction::Cols => {
            for row in rows {
                let elements = &matrix.elements[row * k..(row + 1) * k];
                for (slice, elements) in elements.chunks(SLICE).enumerate() {
                    let dst = row_of(slice, row);
                    for (run, dst) in elements.chunks(64).zip(dst.chunks_exact_mut(64)) {
                        // SAFETY: this function has the instructions.
                        let [low, high] = unsafe { source.run(run) };
                        store(low, dst);
                        store(high, &mut dst[32..]);
                    }
                }
            }
        }
        Contraction::Rows => {
            // Neighbouring rows of A are neighbours in memory, which gives long runs faster.
            for start in (0..k).step_by(DEPTH) {
                for row in rows.clone().step_by(PANEL) {
                    let (mut left, mut right) =
                        ([_mm512_setzero_si512(); 16], [_mm512_setzero_si512(); 16]);
                    for pair in 0..DEPTH / 2 {
                        // SAFETY: this function has the instructions.
                        let pairs = unsafe { source.pairs(matrix, start + 2 * pair, row, ROWS) };
                        [left[pair], right[pair]] = pairs;
                    }
                    for (half, values) in [&left, &right].into_iter().enumerate() {
                        let row = row + half * ROWS;
                        if row < rows.end {
                            for (i, values) in transpose_16(*values).iter().enumerate() {
                                store(
                                    *values,
                                    &mut row_of(start / SLICE, row + i)[start % SLICE..],
                                );
                            }
                        }
                    }
                }
            }
        }
    }
}

/// [`pack_a`] for a matrix that sums over rows, in tiles of pairs.
///
/// # Safety
/// As for [`pack_a`]; `rows.start - first` is a multiple of [`ROWS_STEP`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) unsafe fn pack_a_pairs<S: Source>(
    source: S,
    matrix: Matrix<'_, S::Element>,
    rows: Range<usize>,
    first: usize,
    padded_rows: usize,
    dst: Shared<'_, u16>,
) {
    let k = padded(matrix.contracted);
    for block in rows.clone().step_by(ROWS_STEP) {
        let len = ROWS_STEP.min(rows.end - block);
        for start in (0..k).step_by(SLICE) {
            // The tiles of a block side by side, so that whole cache lines are read.
            let pairs = (k - start).min(SLICE) / 2;
            let mut tiles: [(usize, usize, &mut [u16]); ROWS_STEP / tile_bf16::ROWS] =
                Default::default();
            let (mut count, mut row) = (0, 0);
            while row < len {
                let height = tile_bf16::height(row, len);
                let at = (start / SLICE * padded_rows + block + row - first) * SLICE_STRIDE;
                // SAFETY: the caller guarantees that only this call uses these rows; tiles have their own.
                let values = unsafe { dst.part(at..at + height * SLICE_STRIDE) };
                tiles[count] = (block + row, height, values);
                (count, row) = (count + 1, row + height);
            }
            for pair in 0..pairs {
                let k = start + 2 * pair;
                prefetch_rows(matrix, k + 2 * AHEAD, block);
                // Two tiles from one vector.
                for two in tiles[..count].chunks_mut(2) {
                    // SAFETY: this function has the instructions.
                    let pairs = unsafe { source.pairs(matrix, k, two[0].0, two[0].1) };
                    for (values, (_, height, dst)) in pairs.into_iter().zip(two) {
                        // The rest of the vector is overwritten by the next pair, or lies behind the last one.
                        store(values, &mut dst[pair * 2 * *height..]);
                    }
                }
            }
        }
    }
}

/// Pairs of rows ahead of the one being packed to prefetch: the processor's own prefetch stops at each page.
const AHEAD: usize = 8;

/// Prefetches two rows, [`ROWS_STEP`] columns from `col` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn prefetch_rows<T>(matrix: Matrix<'_, T>, k: usize, col: usize) {
    for row in k..k + 2 {
        let start = matrix
            .elements
            .as_ptr()
            .wrapping_add(row * matrix.kept + col);
        for ahead in (0..ROWS_STEP * size_of::<T>()).step_by(64) {
            prefetch(start.cast(), ahead);
        }
    }
}

/// Packs the panel of kept indices from `first` on as B, for `range` of the sum, which begins and ends at multiples of
/// [`DEPTH`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn pack_b<S: Source>(
    source: S,
    matrix: Matrix<'_, S::Element>,
    first: usize,
    range: Range<usize>,
    dst: &mut [u16],
) {
    match matrix.contraction {
        Contraction::Rows => {
            let (pairs, _) = dst[..range.len() * PANEL].as_chunks_mut::<{ 2 * PANEL }>();
            let kept = matrix.kept;
            if first + PANEL <= kept && range.end <= matrix.contracted {
                // All of the panel lies within the matrix.
                let rows = &matrix.elements[range.start * kept + first..range.end * kept];
                for (rows, dst) in rows.chunks(2 * kept).zip(pairs) {
                    let (row, next) = rows.split_at(kept);
                    let rows = [row, next].map(|row| row.first_chunk().expect("a panel"));
                    // SAFETY: this function has the instructions.
                    let [low, high] = unsafe { source.whole_pair(rows) };
                    store(low, dst);
                    store(high, &mut dst[32..]);
                }
                return;
            }
            for (pair, dst) in pairs.iter_mut().enumerate() {
                // SAFETY: this function has the instructions.
                let [low, high] =
                    unsafe { source.pairs(matrix, range.start + 2 * pair, first, ROWS) };
                store(low, dst);
                store(high, &mut dst[32..]);
            }
        }
        // SAFETY: this function has the instructions.
        Contraction::Cols => unsafe { source.panel_of_cols(matrix, first, range, dst) },
    }
}

/// Decodes packed codes into values packed as B.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn decode_panel(decoder: &Decoder, packed: &[u8], dst: &mut [u16]) {
    decode_pairs(packed, dst, |codes| decoder.decode(codes));
}

/// [`decode_panel`] of one segment of the sum, with what [`PackedPanel::added_at`] says for it added.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn decode_scaled(
    decoder: &Decoder,
    packed: &[u8; PANEL * DEPTH],
    added: &[u16; PANEL],
    dst: &mut [u16],
) {
    let added = added_to_pairs(added);
    decode_pairs(packed, dst, |codes| decoder.decode_scaled(codes, added));
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn decode_pairs(packed: &[u8], dst: &mut [u16], decode: impl Fn(__m512i) -> (__m512i, __m512i)) {
    for (codes, dst) in packed.chunks_exact(64).zip(dst.chunks_exact_mut(64)) {
        prefetch(codes.as_ptr(), 4096);
        let (low, high) = decode(load(codes));
        store(low, dst);
        store(high, &mut dst[32..]);
    }
}
