//! The engine of processors with AVX-512, but without bf16 units: f32 multiply-adds.
//!
//! Codes are decoded directly into the panels that the tiles read, so nothing is packed twice.

use super::super::shared::Shared;
use super::kernel::{Engine, Matrix, Mode, Panel, Sums, prefetch_part, prefetch_rows};
use super::layout::{Order, PANEL, SLICE, SLICE_STRIDE};
use super::results::Block;
use super::tile_f32;
use fp8_core::{Contraction, Format, Isa, IsaLevel};
use std::ops::Range;

/// Kernels that multiply f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct F32Engine(());

impl F32Engine {
    /// The engine for `isa`, if there is one.
    pub(super) fn of(isa: Isa) -> Option<Self> {
        (isa.level() == IsaLevel::Avx512).then_some(Self(()))
    }
}

/// The values of all codes of each format.
pub(super) static VALUES: [[f32; 256]; Format::ALL.len()] = {
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

impl Engine for F32Engine {
    type Value = f32;
    type Session = Self;

    const ORDER: Order = Order::Rows;

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
        let row_of = |slice: usize, row: usize| {
            let start = (slice * padded_rows + row - first) * SLICE_STRIDE;
            // SAFETY: the caller guarantees that only this call uses these rows; it uses one at a time.
            unsafe { dst.part(start..start + SLICE_STRIDE) }
        };
        let values = &VALUES[format as usize];
        for slice in 0..k.div_ceil(SLICE) {
            let range = slice * SLICE..k.min((slice + 1) * SLICE);
            for row in rows.clone() {
                let dst = row_of(slice, row);
                match matrix.contraction {
                    Contraction::Cols => {
                        let start = matrix.place(row, range.start);
                        let codes = &matrix.codes[start..start + range.len()];
                        fp8_core::decode(format, codes, 1., &mut dst[..range.len()]);
                    }
                    Contraction::Rows => {
                        let codes = matrix.codes[matrix.place(row, range.start)..]
                            .iter()
                            .step_by(matrix.kept);
                        for (dst, &code) in dst[..range.len()].iter_mut().zip(codes) {
                            *dst = values[usize::from(code)];
                        }
                    }
                }
                dst[range.len()..].fill(0.);
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
        let values = &VALUES[format as usize];
        let cols = (matrix.kept - first).min(PANEL);
        let rows = matrix.contracted.min(range.end).saturating_sub(range.start);
        let (dst, rest) = dst[..range.len() * PANEL].split_at_mut(rows * PANEL);
        rest.fill(0.);
        match matrix.contraction {
            Contraction::Rows => {
                for (row, dst) in dst.chunks_exact_mut(PANEL).enumerate() {
                    let start = matrix.place(first, range.start + row);
                    let codes = &matrix.codes[start..start + cols];
                    for (dst, &code) in dst.iter_mut().zip(codes) {
                        *dst = values[usize::from(code)];
                    }
                    dst[cols..].fill(0.);
                }
            }
            Contraction::Cols => {
                let codes = |col: usize| {
                    // Columns that are dropped later may have any codes.
                    let col = if col < cols { col } else { 0 };
                    let start = matrix.place(first + col, range.start);
                    matrix.codes[start..start + rows].as_chunks::<8>()
                };
                // Eight codes of two columns at once: one load per eight codes, and consecutive stores to one cache line.
                for col in (0..PANEL).step_by(2) {
                    let [(left, left_rest), (right, right_rest)] = [codes(col), codes(col + 1)];
                    let (chunks, rest) = dst.as_chunks_mut::<{ 8 * PANEL }>();
                    for ((dst, left), right) in chunks.iter_mut().zip(left).zip(right) {
                        let [left, right] = [left, right].map(|codes| u64::from_le_bytes(*codes));
                        for row in 0..8 {
                            let value =
                                |codes: u64| values[usize::from((codes >> (8 * row)) as u8)];
                            dst[row * PANEL + col] = value(left);
                            dst[row * PANEL + col + 1] = value(right);
                        }
                    }
                    let rest = rest.chunks_exact_mut(PANEL);
                    for ((dst, &left), &right) in rest.zip(left_rest).zip(right_rest) {
                        dst[col] = values[usize::from(left)];
                        dst[col + 1] = values[usize::from(right)];
                    }
                }
            }
        }
    }

    fn decode_panel(self, format: Format, packed: &[u8], dst: &mut [f32]) {
        fp8_core::decode(format, packed, 1., &mut dst[..packed.len()]);
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
        let a = &a[skip..];
        let Sums { values, stride } = sums;
        let tiles = rows.div_ceil(tile_f32::ROWS);
        for index in 0..panels {
            let Panel::Values(b) = panel(index) else {
                unreachable!("this engine asks for decoded panels");
            };
            let next = match (index + 1 < panels).then(|| panel(index + 1)) {
                Some(Panel::Values(next)) => next,
                _ => &[],
            };
            for (tile, row) in (0..rows).step_by(tile_f32::ROWS).enumerate() {
                prefetch_part(next, tile, tiles);
                let following = row + tile_f32::ROWS..row + 2 * tile_f32::ROWS;
                if index == 0 {
                    prefetch_rows(a, following, b.len() / PANEL);
                }
                let sums = Sums {
                    values: &mut values[row * stride + index * PANEL..],
                    stride,
                };
                let height = (rows - row).min(tile_f32::ROWS);
                // SAFETY: an engine exists only where its instructions do.
                unsafe {
                    tile_f32::multiply(height, &a[row * SLICE_STRIDE..], b, sums, accumulate)
                };
            }
        }
    }
}
