//! Packing to f32 on aarch64, with the functions of `pack_f32.rs`: codes are brought into the order of `layout.rs` and then decoded,
//! a few indices of the sum at a time.
//!
//! This has been run under an emulator only, and its speed is unmeasured.

use super::kernel::Matrix;
use super::layout::{DEPTH, PANEL, SLICE};
use fp8_core::{Contraction, Format};
use std::arch::aarch64::*;
use std::ops::Range;

/// The most rows of a tile.
pub(super) const MOST_ROWS: usize = 8;

/// Packs one tile of A: kept indices `rows`, `range` of the sum, `[range][rows]`, and zeros for the padding of the sum.
#[target_feature(enable = "neon")]
pub(super) fn tile(
    format: Format,
    matrix: Matrix<'_>,
    rows: Range<usize>,
    range: Range<usize>,
    dst: &mut [f32],
) {
    let height = rows.len();
    assert!(dst.len() >= range.len().next_multiple_of(DEPTH) * height);
    // Codes of some indices of the sum, and room for a vector after them.
    let mut codes = [0u8; MOST_ROWS * DEPTH + 16];
    let firsts = range.clone().step_by(DEPTH);
    for (first, dst) in firsts.zip(dst.chunks_exact_mut(DEPTH * height)) {
        let range = first..range.end.min(first + DEPTH);
        match matrix.contraction {
            Contraction::Rows => {
                for (k, to) in range.clone().zip(codes.chunks_exact_mut(height)) {
                    to.copy_from_slice(&matrix.elements[matrix.place(rows.start, k)..][..height]);
                }
            }
            Contraction::Cols => {
                let row = |index: usize| rows.start + index.min(height - 1);
                let from = lines(matrix, row, &range);
                // Each store overwrites what the one before has written beyond its `height` codes.
                interleave(&from, height, &mut codes);
            }
        }
        let (dst, rest) = dst.split_at_mut(range.len() * height);
        fp8_core::decode(format, &codes[..dst.len()], 1., dst);
        rest.fill(0.);
    }
}

/// Packs a panel of a B that sums over its rows: `[rows][width]`; missing columns become 0.
#[target_feature(enable = "neon")]
pub(super) fn panel_of_rows(
    format: Format,
    matrix: Matrix<'_>,
    cols: Range<usize>,
    rows: Range<usize>,
    width: usize,
    dst: &mut [f32],
) {
    let mut codes = [0u8; SLICE * PANEL];
    for (first, dst) in rows.step_by(SLICE).zip(dst.chunks_mut(SLICE * width)) {
        let codes = &mut codes[..dst.len()];
        for (row, to) in codes.chunks_exact_mut(width).enumerate() {
            let start = matrix.place(cols.start, first + row);
            to[..cols.len()].copy_from_slice(&matrix.elements[start..start + cols.len()]);
        }
        fp8_core::decode(format, codes, 1., dst);
    }
}

/// Packs a panel of a B that sums over its columns: `[rows][width]`, where `rows` are indices of the sum. Missing columns
/// repeat the last one, as their sums are dropped.
#[target_feature(enable = "neon")]
pub(super) fn panel_of_cols(
    format: Format,
    matrix: Matrix<'_>,
    cols: Range<usize>,
    rows: Range<usize>,
    width: usize,
    dst: &mut [f32],
) {
    // Room for a block of rows after them.
    let mut codes = [0u8; (SLICE + 16) * PANEL];
    let firsts = rows.clone().step_by(SLICE);
    for (first, dst) in firsts.zip(dst.chunks_mut(SLICE * width)) {
        let rows = first..rows.end.min(first + SLICE);
        for first_col in (0..width).step_by(16) {
            let col = |index: usize| cols.start + (first_col + index).min(cols.len() - 1);
            interleave(&lines(matrix, col, &rows), width, &mut codes[first_col..]);
        }
        fp8_core::decode(format, &codes[..dst.len()], 1., dst);
    }
}

/// Decodes packed codes of panels of `width` columns, `[pairs][width][2]`, into values packed as B, `[sum][width]`.
#[target_feature(enable = "neon")]
pub(super) fn decode_panel(format: Format, packed: &[u8], width: usize, dst: &mut [f32]) {
    let mut codes = [0u8; SLICE * PANEL];
    let step = SLICE * width;
    for (packed, dst) in packed.chunks(step).zip(dst.chunks_mut(step)) {
        let codes = &mut codes[..packed.len()];
        let pairs = packed.chunks_exact(2 * width);
        for (pair, to) in pairs.zip(codes.chunks_exact_mut(2 * width)) {
            let (even, odd) = to.split_at_mut(width);
            for ((pair, even), odd) in pair.as_chunks::<2>().0.iter().zip(even).zip(odd) {
                [*even, *odd] = *pair;
            }
        }
        fp8_core::decode(format, codes, 1., &mut dst[..packed.len()]);
    }
}

/// The codes of sixteen kept indices for `range` of the sum, which is contiguous.
fn lines<'a>(
    matrix: Matrix<'a>,
    kept: impl Fn(usize) -> usize,
    range: &Range<usize>,
) -> [&'a [u8]; 16] {
    std::array::from_fn(|index| {
        let start = matrix.place(kept(index), range.start);
        &matrix.elements[start..start + range.len()]
    })
}

/// Lines of one length, transposed: sixteen codes to every `stride`th place, for a multiple of sixteen sum indices.
#[inline]
#[target_feature(enable = "neon")]
fn interleave(lines: &[&[u8]; 16], stride: usize, to: &mut [u8]) {
    for first in (0..lines[0].len()).step_by(16) {
        let mut block = [vdupq_n_u8(0); 16];
        for (vector, line) in block.iter_mut().zip(lines) {
            *vector = load_some(&line[first..]);
        }
        for (index, codes) in transpose(block).into_iter().enumerate() {
            let to = to[(first + index) * stride..].first_chunk_mut::<16>();
            let to = to.expect("place for a vector").as_mut_ptr();
            // SAFETY: sixteen bytes.
            unsafe { vst1q_u8(to, codes) };
        }
    }
}

/// Up to sixteen codes, and zeros after them.
#[inline]
#[target_feature(enable = "neon")]
fn load_some(codes: &[u8]) -> uint8x16_t {
    let mut bytes = [0; 16];
    let codes: &[u8; 16] = match codes.first_chunk() {
        Some(codes) => codes,
        None => {
            bytes[..codes.len()].copy_from_slice(codes);
            &bytes
        }
    };
    // SAFETY: sixteen bytes.
    unsafe { vld1q_u8(codes.as_ptr()) }
}

/// A transposed block of bytes: rounds that each interleave the rows of the first half with those of the second.
#[inline]
#[target_feature(enable = "neon")]
fn transpose(mut rows: [uint8x16_t; 16]) -> [uint8x16_t; 16] {
    for _ in 0..4 {
        let mut next = rows;
        for i in 0..8 {
            next[2 * i] = vzip1q_u8(rows[i], rows[i + 8]);
            next[2 * i + 1] = vzip2q_u8(rows[i], rows[i + 8]);
        }
        rows = next;
    }
    rows
}
