//! Units that multiply f32: the kernels of a processor, or plain Rust.

use super::layout::{PANEL, Panel, Rows, Sums};
use super::source::View;
use super::units::{Units, bits};
use crate::base::simd::simd;
use fp8_core::HighPrecision;
use half::bf16;

/// Kernels of f32. A value is proof that the processor has their instructions.
pub(super) trait F32Kernels: Copy + Send + Sync {
    /// The most rows of a product.
    const ROWS: usize;

    /// See [`Units::multiply`].
    fn multiply(self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>);

    /// See [`Units::transpose`].
    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]);
}

/// f32, with operands rounded to bf16 if asked.
#[derive(Clone, Copy)]
pub(super) struct F32Units<K> {
    kernels: K,
    round: bool,
}

impl<K> F32Units<K> {
    pub(super) fn new(kernels: K, round: bool) -> Self {
        Self { kernels, round }
    }
}

impl<K: F32Kernels> Units for F32Units<K> {
    const STEP: usize = 1;
    const ROWS: usize = K::ROWS;

    type Session = ();

    fn session(self) {}

    fn multiply(self, (): &mut (), rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        self.kernels.multiply(rows, a, b, sums);
    }

    fn takes_f32(self, view: &View<'_>) -> bool {
        view.rounding().is_none() && (!self.round || view.is_bf16())
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

    fn columns_of_cells(self, x: &[u32], _: &[u32], cells: &mut [u32]) {
        let (head, tail) = cells.split_at_mut(x.len());
        head.copy_from_slice(x);
        tail.fill(0);
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        self.kernels.transpose(from, stride, to);
    }
}

#[inline(always)]
fn rounded(x: f32) -> f32 {
    let narrow: bf16 = HighPrecision::from_f32(x);
    narrow.to_f32()
}

/// Kernels in plain Rust, for which the compiler uses the vectors of the target.
#[derive(Clone, Copy)]
pub(super) struct Plain;

/// Units that every processor has.
pub(super) fn in_plain_rust(round: bool) -> F32Units<Plain> {
    F32Units::new(Plain, round)
}

impl F32Kernels for Plain {
    const ROWS: usize = 6;

    fn multiply(self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        for row in 0..rows {
            let cells = &a.cells[row * a.row_stride..];
            let to = sums.values[row * sums.stride..].first_chunk_mut();
            let to: &mut [f32; PANEL] = to.expect("a panel of sums");
            let mut tile = if sums.accumulate { *to } else { [0.0; PANEL] };
            for step in 0..b.steps {
                let x = f32::from_bits(cells[step * a.step_stride]);
                let columns = b.cells[step * b.stride..].first_chunk::<PANEL>();
                for (sum, y) in tile.iter_mut().zip(columns.expect("a panel")) {
                    *sum += x * f32::from_bits(*y);
                }
            }
            *to = tile;
        }
    }

    fn transpose(self, from: &[u32], stride: usize, to: &mut [u32]) {
        transpose_from(0, from, stride, to);
    }
}

/// [`Units::transpose`] from step `first` on.
pub(super) fn transpose_from(first: usize, from: &[u32], stride: usize, to: &mut [u32]) {
    let (steps, _) = to.as_chunks_mut::<PANEL>();
    for (step, to) in steps.iter_mut().enumerate().skip(first) {
        for (row, to) in to.iter_mut().enumerate() {
            *to = from[row * stride + step];
        }
    }
}
