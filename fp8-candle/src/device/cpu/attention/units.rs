//! The units of a processor that multiply, and how their operands lie in memory.
//!
//! Operands are made of cells of 32 bits: one f32, or a pair of bf16 that are neighbours in the sum. Sums run over steps of
//! one cell. The left operand of a product has rows of cells, of any strides; the right one has panels of 32 columns, one cell
//! of each column per step.

use super::super::scratch::Plain;
use super::cast::RowCast;
use super::layout::{Panel, Rows, Sums};
use super::source::{Tokens, View};
use std::ops::Range;

/// Kernels of a processor. Holding units is proof that it has their instructions.
pub(super) trait Units: Copy + Send + Sync {
    /// Neighbours of the sum in a cell.
    const STEP: usize;

    /// The most rows of a product.
    const ROWS: usize;

    /// How many steps are summed together. Sums that go on where others have ended begin at a multiple of this; 32 is one of
    /// [`Units::STEP`] times this.
    const TOGETHER: usize = 1;

    /// What a thread needs to multiply.
    type Session;

    /// Sets a thread up. It must have only one session at a time, and compute no products of matrices meanwhile.
    fn session(self) -> Self::Session;

    /// Computes `rows x 32` sums.
    fn multiply(
        self,
        session: &mut Self::Session,
        rows: usize,
        a: Rows<'_>,
        b: Panel<'_>,
        sums: Sums<'_>,
    );

    /// Whether the values of a tensor in f32 are cells as they are.
    fn takes_f32(self, view: &View<'_>) -> bool;

    /// Tokens of a head as rows of cells, each so far from the next, where pairs lie in memory.
    fn pairs<'a>(
        self,
        _: &View<'a>,
        _at: [usize; 2],
        _tokens: Range<usize>,
    ) -> Option<(&'a [u32], usize)> {
        None
    }

    /// Writes tokens of a head as rows of cells, one behind the other, if the tensor holds FP8 codes and these units decode such codes
    /// to cells at once.
    fn decode_pairs(
        self,
        _: &View<'_>,
        _at: [usize; 2],
        _tokens: Range<usize>,
        _to: &mut [u32],
    ) -> bool {
        false
    }

    /// Writes rows of values as rows of cells of the values of their codes, if these units do that at once.
    fn round_to_pairs(self, _: RowCast, _: Tokens<'_>, _to: &mut [u32]) -> bool {
        false
    }

    /// Cells of neighbours of a row; zeros follow its end.
    fn cells(self, row: &[f32], cells: &mut [u32]);

    /// The first half, or all, of a row becomes its cells. Its length is a multiple of 32.
    fn cells_in_place(self, row: &mut [f32]);

    /// Cells of neighbouring rows, `x` and, if cells are pairs, `y`; zeros follow the ends of both. Chunks of 32 cells are
    /// `stride` apart.
    fn columns(self, x: &[f32], y: &[f32], cells: &mut [u32], stride: usize);

    /// [`Units::columns`] of rows whose cells are given; `cells` are whole chunks of 32, one behind the other.
    fn columns_of_cells(self, x: &[u32], y: &[u32], cells: &mut [u32]);

    /// The transpose of 32 rows of cells that are `stride` apart: `to[step * 32 + row]`, as many steps as `to` holds.
    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]);
}

impl Plain for u32 {}

/// The bits of f32 values.
pub(super) fn bits(values: &[f32]) -> &[u32] {
    // SAFETY: both have four bytes and the same alignment, and any bits are a u32.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), values.len()) }
}
