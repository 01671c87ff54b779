//! The units of a processor that multiply, and how their operands lie in memory.
//!
//! Operands are made of cells of 32 bits: one f32, or a pair of bf16 that are neighbours in the sum. Sums run over steps of
//! one cell. The left operand of a product has rows of cells, of any strides; the right one has panels of 32 columns, one cell
//! of each column per step.

use super::super::gemm::{Plain, transpose_16};
use super::layout::{PANEL, Panel, Rows, Sums};
use super::tile;
use crate::base::simd::simd;
use fp8_core::{HighPrecision, Isa, IsaLevel};
use half::bf16;
use std::arch::x86_64::*;

/// Kernels of a processor. Holding units is proof that it has their instructions.
pub(super) trait Units: Copy + Send + Sync {
    /// Neighbours of the sum in a cell.
    const STEP: usize;

    /// The most rows of a product.
    const ROWS: usize;

    /// Computes `rows x 32` sums.
    fn multiply(self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>);

    /// Cells of neighbours of a row; zeros follow its end.
    fn cells(self, row: &[f32], cells: &mut [u32]);

    /// The first half, or all, of a row becomes its cells. Its length is a multiple of 32.
    fn cells_in_place(self, row: &mut [f32]);

    /// Cells of neighbouring rows, `x` and, if cells are pairs, `y`; zeros follow the ends of both. Chunks of 32 cells are
    /// `stride` apart.
    fn columns(self, x: &[f32], y: &[f32], cells: &mut [u32], stride: usize);

    /// The transpose of 32 rows of cells that are `stride` apart: `to[step * 32 + row]`, as many steps as `to` holds.
    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]);
}

impl Plain for u32 {}

/// The bits of f32 values.
pub(super) fn bits(values: &[f32]) -> &[u32] {
    // SAFETY: both have four bytes and the same alignment, and any bits are a u32.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) }
}

/// `values` cut or extended by zeros to one chunk.
#[inline]
fn chunk<'a>(values: &'a [f32], at: usize, buffer: &'a mut [f32; PANEL]) -> &'a [f32; PANEL] {
    let values = values.get(at..).unwrap_or(&[]);
    match values.first_chunk() {
        Some(chunk) => chunk,
        None => {
            *buffer = [0.0; PANEL];
            buffer[..values.len()].copy_from_slice(values);
            buffer
        }
    }
}

/// Pairs of bf16, multiplied by `vdpbf16ps`.
#[derive(Clone, Copy)]
pub(super) struct Bf16Units(());

impl Bf16Units {
    pub(super) fn of(isa: Isa) -> Option<Self> {
        let has = matches!(isa.level(), IsaLevel::Avx512Bf16 | IsaLevel::Amx);
        has.then_some(Self(()))
    }
}

impl Units for Bf16Units {
    const STEP: usize = 2;
    const ROWS: usize = 12;

    fn multiply(self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        // SAFETY: units exist only where their instructions do.
        unsafe { tile::bf16(rows, a, b, sums) }
    }

    fn cells(self, row: &[f32], cells: &mut [u32]) {
        // SAFETY: as above.
        unsafe { bf16_cells(row, cells) }
    }

    fn cells_in_place(self, row: &mut [f32]) {
        // SAFETY: as above.
        unsafe { bf16_cells_in_place(row) }
    }

    fn columns(self, x: &[f32], y: &[f32], cells: &mut [u32], stride: usize) {
        // SAFETY: as above.
        unsafe { bf16_columns(x, y, cells, stride) }
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        // SAFETY: as above.
        unsafe { transpose_512(from, stride, to) }
    }
}

/// 32 values as sixteen cells.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn neighbours(values: &[f32; PANEL]) -> __m512i {
    // SAFETY: the array is two vectors; both types of the result have 64 bytes.
    unsafe {
        let (low, high) = (values.as_ptr(), values.as_ptr().add(16));
        let pairs = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(high), _mm512_loadu_ps(low));
        std::mem::transmute::<__m512bh, __m512i>(pairs)
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn bf16_cells(row: &[f32], cells: &mut [u32]) {
    let mut buffer = [0.0; PANEL];
    for (index, cells) in cells.chunks_mut(PANEL / 2).enumerate() {
        let pairs = neighbours(chunk(row, index * PANEL, &mut buffer));
        let mask = ((1u32 << cells.len()) - 1) as u16;
        // SAFETY: the mask has a bit for each cell of the chunk.
        unsafe { _mm512_mask_storeu_epi32(cells.as_mut_ptr().cast(), mask, pairs) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn bf16_cells_in_place(row: &mut [f32]) {
    for index in 0..row.len() / PANEL {
        let values = row[index * PANEL..].first_chunk().expect("whole chunks");
        let pairs = neighbours(values);
        let to = &mut row[index * PANEL / 2..][..PANEL / 2];
        // SAFETY: sixteen values are one vector.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), pairs) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16")]
fn bf16_columns(x: &[f32], y: &[f32], cells: &mut [u32], stride: usize) {
    let (mut x_buffer, mut y_buffer) = ([0.0; PANEL], [0.0; PANEL]);
    for index in 0..x.len().max(y.len()).div_ceil(PANEL) {
        let cells = &mut cells[index * stride..][..PANEL];
        let x = chunk(x, index * PANEL, &mut x_buffer);
        let y = chunk(y, index * PANEL, &mut y_buffer);
        for half in [0, PANEL / 2] {
            // SAFETY: the chunks are two vectors each, and so is that of the cells; eight pairs have 32 bytes.
            unsafe {
                let wide = |values: &[f32; PANEL]| {
                    let values = _mm512_loadu_ps(values.as_ptr().add(half));
                    let narrow =
                        std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(values));
                    _mm512_cvtepu16_epi32(narrow)
                };
                let pairs = _mm512_or_si512(wide(x), _mm512_slli_epi32::<16>(wide(y)));
                _mm512_storeu_si512(cells.as_mut_ptr().add(half).cast(), pairs);
            }
        }
    }
}

/// f32, with operands rounded to bf16 if asked.
#[derive(Clone, Copy)]
pub(super) struct F32Units<const AVX512: bool> {
    round: bool,
}

impl F32Units<true> {
    pub(super) fn of(isa: Isa, round: bool) -> Option<Self> {
        let has = !matches!(isa.level(), IsaLevel::Portable | IsaLevel::Avx2);
        has.then_some(Self { round })
    }
}

impl F32Units<false> {
    pub(super) fn of(isa: Isa, round: bool) -> Option<Self> {
        (isa.level() != IsaLevel::Portable).then_some(Self { round })
    }
}

impl<const AVX512: bool> Units for F32Units<AVX512> {
    const STEP: usize = 1;
    const ROWS: usize = if AVX512 { 12 } else { 6 };

    fn multiply(self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        if AVX512 {
            // SAFETY: units exist only where their instructions do.
            unsafe { tile::avx512(rows, a, b, sums) }
        } else {
            // SAFETY: as above.
            unsafe { tile::avx2(rows, a, b, sums) }
        }
    }

    fn cells(self, row: &[f32], cells: &mut [u32]) {
        let (head, tail) = cells.split_at_mut(row.len().min(cells.len()));
        tail.fill(0);
        if self.round {
            simd(
                #[inline(always)]
                || {
                    for (cell, &x) in head.iter_mut().zip(row) {
                        *cell = rounded(x).to_bits();
                    }
                },
            );
        } else {
            head.copy_from_slice(&bits(row)[..head.len()]);
        }
    }

    fn cells_in_place(self, row: &mut [f32]) {
        if self.round {
            simd(
                #[inline(always)]
                || row.iter_mut().for_each(|x| *x = rounded(*x)),
            );
        }
    }

    fn columns(self, x: &[f32], _: &[f32], cells: &mut [u32], stride: usize) {
        for (index, x) in x.chunks(PANEL).enumerate() {
            self.cells(x, &mut cells[index * stride..][..PANEL]);
        }
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        if AVX512 {
            // SAFETY: units exist only where their instructions do.
            unsafe { transpose_512(from, stride, to) }
        } else {
            transpose_from(0, from, stride, to);
        }
    }
}

#[inline(always)]
fn rounded(x: f32) -> f32 {
    let narrow: bf16 = HighPrecision::from_f32(x);
    narrow.to_f32()
}

/// From step `first` on.
fn transpose_from(first: usize, from: &[u32], stride: usize, to: &mut [u32]) {
    let (steps, _) = to.as_chunks_mut::<PANEL>();
    for (step, to) in steps.iter_mut().enumerate().skip(first) {
        for (row, to) in to.iter_mut().enumerate() {
            *to = from[row * stride + step];
        }
    }
}

#[target_feature(enable = "avx512f")]
fn transpose_512(from: &[u32], stride: usize, to: &mut [u32]) {
    let steps = to.len() / PANEL;
    let whole = steps / 16 * 16;
    assert!(steps <= stride && from.len() >= (PANEL - 1) * stride + steps);
    for step in (0..whole).step_by(16) {
        for half in [0, 16] {
            // SAFETY: rows `half..half + 16` hold steps `step..step + 16`, and `to` holds `half..half + 16` of each.
            unsafe {
                let row = |row: usize| {
                    _mm512_loadu_si512(from.as_ptr().add((half + row) * stride + step).cast())
                };
                let columns = transpose_16(std::array::from_fn(row));
                for (i, column) in columns.into_iter().enumerate() {
                    let to = to.as_mut_ptr().add((step + i) * PANEL + half);
                    _mm512_storeu_si512(to.cast(), column);
                }
            }
        }
    }
    transpose_from(whole, from, stride, to);
}
