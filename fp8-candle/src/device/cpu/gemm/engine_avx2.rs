//! The engine of processors with AVX2 only: f32 multiply-adds.
//!
//! Codes are decoded directly into the tiles and panels that are multiplied, so nothing is packed twice.

use super::super::shared::Shared;
use super::kernel::{Engine, Matrix, Mode, Panel, Sums, prefetch_part};
use super::layout::{NARROW_PANEL, Order, SLICE, SLICE_STRIDE};
use super::pack_avx2;
use super::results::Block;
use super::tile_avx2::{self, ROWS};
use fp8_core::{Contraction, Format, Isa, IsaLevel};
use std::ops::Range;

/// Kernels that multiply f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Avx2Engine(());

impl Avx2Engine {
    /// The engine for `isa`, if it is its level.
    pub(super) fn of(isa: Isa) -> Option<Self> {
        (isa.level() == IsaLevel::Avx2).then_some(Self(()))
    }
}

impl Engine for Avx2Engine {
    type Value = f32;
    type Session = Self;

    const ORDER: Order = Order::NarrowRows;

    fn task_size(self) -> (usize, usize) {
        (192, 16)
    }

    fn packed_rows(self) -> usize {
        // Panels are decoded slice by slice into the first-level cache.
        0
    }

    unsafe fn pack_a(
        self,
        format: Format,
        matrix: Matrix<'_>,
        rows: Range<usize>,
        first: usize,
        padded_rows: usize,
        dst: Shared<'_, f32>,
    ) {
        let k = matrix.contracted;
        for slice in 0..k.div_ceil(SLICE) {
            let range = slice * SLICE..k.min((slice + 1) * SLICE);
            for row in rows.clone().step_by(ROWS) {
                let tile = row..rows.end.min(row + ROWS);
                let start = (slice * padded_rows + row - first) * SLICE_STRIDE;
                // SAFETY: the caller guarantees that only this call uses these rows; it uses the place of one tile at a time.
                let dst = unsafe { dst.part(start..start + tile.len() * SLICE_STRIDE) };
                // SAFETY: an engine exists only where its instructions do.
                unsafe { pack_avx2::tile(format, matrix, tile, range.clone(), dst) };
            }
        }
    }

    fn pack_b(
        self,
        format: Format,
        matrix: Matrix<'_>,
        first: usize,
        range: Range<usize>,
        dst: &mut [f32],
    ) {
        let cols = first..matrix.kept.min(first + NARROW_PANEL);
        let rows = range.start..matrix.contracted.min(range.end).max(range.start);
        let (dst, rest) = dst[..range.len() * NARROW_PANEL].split_at_mut(rows.len() * NARROW_PANEL);
        rest.fill(0.);
        // SAFETY: an engine exists only where its instructions do.
        unsafe {
            match matrix.contraction {
                Contraction::Rows => pack_avx2::panel_of_rows(format, matrix, cols, rows, dst),
                Contraction::Cols => pack_avx2::panel_of_cols(format, matrix, cols, rows, dst),
            }
        }
    }

    fn decode_panel(self, format: Format, packed: &[u8], dst: &mut [f32]) {
        // SAFETY: an engine exists only where its instructions do.
        unsafe { pack_avx2::decode(format, packed, &mut dst[..packed.len()]) };
    }

    unsafe fn session(self, _: Format, _: bool) -> Self {
        self
    }

    fn multiply<'b>(
        _: &Self::Session,
        a: &[f32],
        rows: usize,
        panels: usize,
        panel: impl Fn(usize) -> Panel<'b, f32>,
        sums: Sums<'_>,
        _: Option<Block<'_>>,
        Mode {
            accumulate, skip, ..
        }: Mode,
    ) {
        let Sums { values, stride } = sums;
        let tiles = rows.div_ceil(ROWS);
        for index in 0..panels {
            let Panel::Values(b) = panel(index) else {
                unreachable!("this engine asks for decoded panels");
            };
            let next = match (index + 1 < panels).then(|| panel(index + 1)) {
                Some(Panel::Values(next)) => next,
                _ => &[],
            };
            for (tile, row) in (0..rows).step_by(ROWS).enumerate() {
                prefetch_part(next, tile, tiles);
                let height = (rows - row).min(ROWS);
                let sums = Sums {
                    values: &mut values[row * stride + index * NARROW_PANEL..],
                    stride,
                };
                let a = &a[row * SLICE_STRIDE + skip * height..];
                // SAFETY: an engine exists only where its instructions do.
                unsafe { tile_avx2::multiply(height, a, b, sums, accumulate) };
            }
        }
    }
}
