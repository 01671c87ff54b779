//! The units of a processor that multiply, and how their operands lie in memory.
//!
//! Operands are made of cells of 32 bits: one f32, or a pair of bf16 that are neighbours in the sum. Sums run over steps of
//! one cell. The left operand of a product has rows of cells, of any strides; the right one has panels of 32 columns, one cell
//! of each column per step.

use super::super::gemm::Plain;
use super::layout::{Panel, Rows, Sums};

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
