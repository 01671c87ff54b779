//! From codes to panels of bf16, with AVX-512 VBMI. Every FP8 value is exact in bf16; the layouts are those of `layout.rs`.

use super::decoder::{Decoder, load, prefetch};
use super::kernel::Matrix;
use super::layout::{DEPTH, Order, PANEL, ROWS, ROWS_STEP, SLICE, SLICE_STRIDE, padded};
use super::tile_bf16;
use crate::base::parallel::shared::Shared;
use fp8_core::Contraction;
use std::arch::x86_64::*;
use std::ops::Range;

/// Up to 32 bytes, zeros after them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn load_half(bytes: &[u8]) -> __m256i {
    let mask = match bytes.len() {
        0 => 0,
        len => u32::MAX >> (32 - len.min(32)),
    };
    // SAFETY: only the bytes of the mask are read, which lie in the slice.
    unsafe { _mm256_maskz_loadu_epi8(mask, bytes.as_ptr().cast()) }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn store(values: __m512i, dst: &mut [u16]) {
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

/// Packs kept indices `rows` of `matrix` as A; `first` is the kept index of the first packed row.
///
/// # Safety
/// No other task may use these rows of `dst` at the same time. `rows.start - first` is a multiple of 32.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) unsafe fn pack_a(
    decoder: &Decoder,
    matrix: Matrix<'_>,
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
            let in_order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
            for row in rows {
                let codes = &matrix.codes[row * k..(row + 1) * k];
                for (slice, codes) in codes.chunks(SLICE).enumerate() {
                    let dst = row_of(slice, row);
                    for (codes, dst) in codes.chunks(64).zip(dst.chunks_exact_mut(64)) {
                        let (low, high) =
                            decoder.decode(_mm512_permutexvar_epi64(in_order, load(codes)));
                        store(low, dst);
                        store(high, &mut dst[32..]);
                    }
                }
            }
        }
        Contraction::Rows => {
            for row in rows.clone().step_by(PANEL) {
                for start in (0..k).step_by(DEPTH) {
                    let (mut left, mut right) =
                        ([_mm512_setzero_si512(); 16], [_mm512_setzero_si512(); 16]);
                    for pair in 0..DEPTH / 2 {
                        let codes = pair_of_rows(matrix, start + 2 * pair, row, ROWS);
                        (left[pair], right[pair]) = decoder.decode(codes);
                    }
                    for (half, values) in [left, right].into_iter().enumerate() {
                        let row = row + half * ROWS;
                        if row < rows.end {
                            for (i, values) in transpose_16(values).into_iter().enumerate() {
                                store(values, &mut row_of(start / SLICE, row + i)[start % SLICE..]);
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
pub(super) unsafe fn pack_a_pairs(
    decoder: &Decoder,
    matrix: Matrix<'_>,
    rows: Range<usize>,
    first: usize,
    padded_rows: usize,
    dst: Shared<'_, u16>,
) {
    let k = padded(matrix.contracted);
    for block in rows.clone().step_by(ROWS_STEP) {
        let len = ROWS_STEP.min(rows.end - block);
        for start in (0..k).step_by(SLICE) {
            // The tiles of a block side by side, so that whole cache lines of codes are read.
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
                    let codes = pair_of_rows(matrix, k, two[0].0, two[0].1);
                    let (left, right) = decoder.decode(codes);
                    for (values, (_, height, dst)) in [left, right].into_iter().zip(two) {
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

/// Prefetches two rows of codes, [`ROWS_STEP`] columns from `col` on.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn prefetch_rows(matrix: Matrix<'_>, k: usize, col: usize) {
    for row in k..k + 2 {
        let start = matrix.codes.as_ptr().wrapping_add(row * matrix.kept + col);
        for ahead in (0..ROWS_STEP).step_by(64) {
            prefetch(start, ahead);
        }
    }
}

/// Rows `k` and `k + 1` of the columns from `col` on of a matrix that sums over rows, in the order of packed codes: `left`
/// columns for the low halves and as many as there are after them, up to 16, for the high halves.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
fn pair_of_rows(matrix: Matrix<'_>, k: usize, col: usize, left: usize) -> __m512i {
    /// For each number of columns in the low halves.
    static ORDERS: [[u8; 64]; 17] = {
        let mut orders = [[0; 64]; 17];
        let mut left = 0;
        while left <= 16 {
            let mut col = 0;
            while col < PANEL {
                // Unused lanes repeat the first ones: other codes might need the slow lookup.
                let from = if col < 16 {
                    if col < left { col } else { 0 }
                } else if col - 16 < left {
                    left + col - 16
                } else {
                    0
                };
                orders[left][Order::Pairs.place(col, 0)] = from as u8;
                orders[left][Order::Pairs.place(col, 1)] = (PANEL + from) as u8;
                col += 1;
            }
            left += 1;
        }
        orders
    };
    let row = |k: usize| {
        if k >= matrix.contracted {
            return _mm256_setzero_si256();
        }
        let start = k * matrix.kept;
        load_half(&matrix.codes[start + col..start + matrix.kept])
    };
    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(row(k)), row(k + 1));
    _mm512_permutexvar_epi8(load(&ORDERS[left]), both)
}

/// Packs the panel of kept indices from `first` on as B, for `range` of the sum, which begins and ends at multiples of
/// [`DEPTH`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn pack_b(
    decoder: &Decoder,
    matrix: Matrix<'_>,
    first: usize,
    range: Range<usize>,
    dst: &mut [u16],
) {
    let k = matrix.contracted;
    match matrix.contraction {
        Contraction::Rows => {
            for (pair, dst) in dst[..range.len() * PANEL]
                .chunks_exact_mut(2 * PANEL)
                .enumerate()
            {
                let row = range.start + 2 * pair;
                for row in row + 2 * AHEAD..row + 2 * AHEAD + 2 {
                    prefetch(matrix.codes.as_ptr().wrapping_add(row * matrix.kept), first);
                }
                let codes = pair_of_rows(matrix, row, first, ROWS);
                let (low, high) = decoder.decode(codes);
                store(low, dst);
                store(high, &mut dst[32..]);
            }
        }
        Contraction::Cols => {
            // Within each lane: the first two codes of its four columns, then the other two.
            let order = _mm512_broadcast_i32x4(_mm_setr_epi8(
                0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15,
            ));
            for half in 0..2 {
                let first = first + half * 16;
                let cols = matrix.kept.saturating_sub(first).min(16);
                for start in range.clone().step_by(64) {
                    let mut rows = [_mm512_setzero_si512(); 16];
                    for (col, row) in rows[..cols].iter_mut().enumerate() {
                        let codes = &matrix.codes[(first + col) * k..(first + col + 1) * k];
                        // Further codes of the same columns or, at their end, the columns of the next panel.
                        let next = if start + SLICE < k {
                            0
                        } else {
                            (PANEL - 1) * k
                        };
                        prefetch(codes.as_ptr().wrapping_add(start), SLICE + next);
                        *row = load(&codes[start.min(k)..]);
                    }
                    let fours = (range.end - start).min(64) / 4;
                    for (four, codes) in transpose_16(rows).into_iter().take(fours).enumerate() {
                        let (low, high) = decoder.decode(_mm512_shuffle_epi8(codes, order));
                        let at = start - range.start + four * 4;
                        let dst = &mut dst[at * PANEL + half * 32..];
                        store(low, dst);
                        store(high, &mut dst[2 * PANEL..]);
                    }
                }
            }
        }
    }
}

/// Decodes packed codes into values packed as B.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,gfni")]
pub(super) fn decode_panel(decoder: &Decoder, packed: &[u8], dst: &mut [u16]) {
    for (codes, dst) in packed.chunks_exact(64).zip(dst.chunks_exact_mut(64)) {
        prefetch(codes.as_ptr(), 4096);
        let (low, high) = decoder.decode(load(codes));
        store(low, dst);
        store(high, &mut dst[32..]);
    }
}
