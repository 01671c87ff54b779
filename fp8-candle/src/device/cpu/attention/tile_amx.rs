//! Sums of products of pairs of bf16 with AMX: up to 32 rows by one panel of 32 columns, 16 steps at a time.
//!
//! Of each 16 steps `tdpbf16ps` adds the products of even indices to one number and those of odd indices to another, then both to the
//! sum. So all products have to divide a sum into the same 16 steps ([`Units::TOGETHER`](super::units::Units::TOGETHER)); steps of zeros
//! change nothing.

use super::super::gemm::{Tiles, transpose_16};
use super::layout::{PANEL, Panel, Rows, Sums};
use std::arch::x86_64::*;

/// Steps of a tile.
pub(super) const DEPTH: usize = 16;

/// Rows of a tile.
const HEIGHT: usize = 16;

/// The most rows of a product.
pub(super) const ROWS: usize = 2 * HEIGHT;

/// The tiles of a thread, and operands that are padded for them.
pub(super) struct Session {
    tiles: Tiles,
    /// Rows of the left operand.
    rows: Vec<u32>,
    /// The last steps of the right one.
    steps: Vec<u32>,
    /// Sums of fewer rows than tiles have.
    sums: Vec<f32>,
}

impl Session {
    /// # Safety
    /// As for [`Tiles::new`].
    pub(super) unsafe fn new() -> Self {
        Self {
            // SAFETY: guaranteed by the caller.
            tiles: unsafe { Tiles::new() },
            rows: Vec::new(),
            steps: vec![0; DEPTH * PANEL],
            sums: vec![0.; ROWS * PANEL],
        }
    }

    /// Computes `rows x 32` sums, from 1 to 32 rows, or adds to them.
    pub(super) fn multiply(&mut self, rows: usize, a: Rows<'_>, b: Panel<'_>, sums: Sums<'_>) {
        assert!((1..=ROWS).contains(&rows));
        let padded = b.steps.next_multiple_of(DEPTH);
        let whole = rows.is_multiple_of(HEIGHT);
        let (cells, row_stride) = match whole && a.step_stride == 1 && padded == b.steps {
            true => (a.cells, a.row_stride),
            false => {
                pad(rows, a, b.steps, &mut self.rows);
                (&*self.rows, padded)
            }
        };
        let (before, rest) = (b.steps / DEPTH, b.steps % DEPTH);
        if rest > 0 {
            for (step, to) in self.steps.chunks_exact_mut(PANEL).enumerate() {
                match step < rest {
                    true => {
                        to.copy_from_slice(&b.cells[(before * DEPTH + step) * b.stride..][..PANEL])
                    }
                    false => to.fill(0),
                }
            }
        }
        let Sums {
            values,
            stride,
            accumulate,
        } = sums;
        let product = Product {
            short: rows <= HEIGHT,
            a: (cells, row_stride),
            b: (b.cells, b.stride),
            whole_steps: before,
            last: (rest > 0).then_some(&*self.steps),
        };
        if whole {
            return product.run(&self.tiles, (values, stride), accumulate);
        }
        for row in 0..if accumulate { rows } else { 0 } {
            let from = &values[row * stride..][..PANEL];
            self.sums[row * PANEL..][..PANEL].copy_from_slice(from);
        }
        product.run(&self.tiles, (&mut self.sums, PANEL), accumulate);
        for (row, from) in self.sums.chunks_exact(PANEL).enumerate().take(rows) {
            values[row * stride..][..PANEL].copy_from_slice(from);
        }
    }
}

/// Rows of cells one behind the other, of `steps` cells and zeros, as many rows as tiles have.
fn pad(rows: usize, a: Rows<'_>, steps: usize, to: &mut Vec<u32>) {
    let padded = steps.next_multiple_of(DEPTH);
    to.clear();
    to.resize(rows.next_multiple_of(HEIGHT) * padded, 0);
    if a.step_stride == 1 {
        for (row, to) in to.chunks_exact_mut(padded.max(1)).enumerate().take(rows) {
            to[..steps].copy_from_slice(&a.cells[row * a.row_stride..][..steps]);
        }
        return;
    }
    if a.row_stride == 1 && rows.is_multiple_of(HEIGHT) {
        for step in (0..steps).step_by(DEPTH) {
            for row in (0..rows).step_by(HEIGHT) {
                let cells = &a.cells[step * a.step_stride + row..];
                let count = DEPTH.min(steps - step);
                // SAFETY: every processor with AMX has these instructions.
                unsafe {
                    transpose(
                        (cells, a.step_stride),
                        count,
                        &mut to[row * padded + step..],
                        padded,
                    )
                };
            }
        }
        return;
    }
    for (row, to) in to.chunks_exact_mut(padded.max(1)).enumerate().take(rows) {
        for (step, to) in to[..steps].iter_mut().enumerate() {
            *to = a.cells[row * a.row_stride + step * a.step_stride];
        }
    }
}

/// Sixteen columns of up to sixteen rows, which are `stride` apart, as rows `to_stride` apart.
#[target_feature(enable = "avx512f")]
fn transpose((from, stride): (&[u32], usize), rows: usize, to: &mut [u32], to_stride: usize) {
    assert!((1..=DEPTH).contains(&rows) && (rows - 1) * stride + HEIGHT <= from.len());
    assert!((HEIGHT - 1) * to_stride + DEPTH <= to.len());
    let columns = transpose_16(std::array::from_fn(|row| match row < rows {
        // SAFETY: sixteen cells of a row that the assertion has bounded.
        true => unsafe { _mm512_loadu_si512(from.as_ptr().add(row * stride).cast()) },
        false => _mm512_setzero_si512(),
    }));
    for (row, cells) in columns.into_iter().enumerate() {
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(row * to_stride).cast(), cells) };
    }
}

/// Operands that are whole in rows and steps, but for the last steps of the right one.
struct Product<'a> {
    /// One tile of rows instead of two.
    short: bool,
    a: (&'a [u32], usize),
    b: (&'a [u32], usize),
    /// Of [`DEPTH`] steps each.
    whole_steps: usize,
    /// Further steps of B.
    last: Option<&'a [u32]>,
}

impl Product<'_> {
    fn run(&self, tiles: &Tiles, (values, stride): (&mut [f32], usize), accumulate: bool) {
        let ((a, a_stride), (b, b_stride)) = (self.a, self.b);
        tiles.start(self.short, accumulate.then_some((&*values, stride)));
        for step in 0..self.whole_steps {
            let (a, b) = (&a[step * DEPTH..], &b[step * DEPTH * b_stride..]);
            tiles.step(self.short, false, (a, a_stride), (b, b_stride));
        }
        if let Some(last) = self.last {
            let a = &a[self.whole_steps * DEPTH..];
            tiles.step(self.short, false, (a, a_stride), (last, PANEL));
        }
        tiles.finish(self.short, (values, stride));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_core::{Isa, IsaLevel};

    /// The pair of a cell.
    fn pair(cell: u32) -> [f32; 2] {
        [cell << 16, cell & 0xFFFF_0000].map(f32::from_bits)
    }

    /// The definition of a sum.
    fn defined(
        steps: usize,
        a: impl Fn(usize) -> u32,
        b: impl Fn(usize) -> u32,
        first: f32,
    ) -> f32 {
        let mut total = first;
        for start in (0..steps).step_by(DEPTH) {
            let mut parts = [0f32; 2];
            for step in start..steps.min(start + DEPTH) {
                let (a, b) = (pair(a(step)), pair(b(step)));
                for (part, (a, b)) in parts.iter_mut().zip(a.into_iter().zip(b)) {
                    *part = a.mul_add(b, *part);
                }
            }
            total += parts[0] + parts[1];
        }
        total
    }

    #[test]
    fn tiles_equal_their_definition() {
        if Isa::best().level() != IsaLevel::Amx {
            return;
        }
        // Two bf16 between 1 and 4 with signs, in an order without a pattern that sums would see.
        let cell = |i: usize| {
            let bits = i.wrapping_mul(2_654_435_761) >> 5;
            (bits as u32 & 0x80FF_80FF) | 0x3F80_3F80
        };
        // SAFETY: the processor has tiles, and this thread has no others.
        let mut session = unsafe { Session::new() };
        for rows in [1, 3, 15, 16, 17, 31, 32] {
            for steps in [0, 1, 15, 16, 20, 32, 45] {
                // Rows of cells, or columns as weights of keys have them.
                for (row_stride, step_stride) in [(steps + 3, 1), (1, PANEL), (2, 2 * PANEL)] {
                    let len = rows * row_stride + (steps + 1) * step_stride.max(1) + ROWS;
                    let a: Vec<u32> = (0..len).map(cell).collect();
                    let b_stride = PANEL + 5;
                    let b: Vec<u32> = (0..(steps + 1) * b_stride).map(|i| cell(i + 999)).collect();
                    for accumulate in [false, true] {
                        let stride = PANEL + 7;
                        let before: Vec<f32> = (0..rows * stride).map(|i| i as f32 / 7.).collect();
                        let mut values = before.clone();
                        let rows_of_a = Rows {
                            cells: &a,
                            row_stride,
                            step_stride,
                        };
                        let panel = Panel {
                            cells: &b,
                            stride: b_stride,
                            steps,
                        };
                        let sums = Sums {
                            values: &mut values,
                            stride,
                            accumulate,
                        };
                        session.multiply(rows, rows_of_a, panel, sums);
                        for (at, (&got, &before)) in values.iter().zip(&before).enumerate() {
                            let (row, column) = (at / stride, at % stride);
                            let expected = match column < PANEL {
                                true => defined(
                                    steps,
                                    |step| a[row * row_stride + step * step_stride],
                                    |step| b[step * b_stride + column],
                                    if accumulate { before } else { 0. },
                                ),
                                false => before,
                            };
                            assert_eq!(
                                got.to_bits(),
                                expected.to_bits(),
                                "{rows} rows, {steps} steps of {row_stride} and {step_stride}, row {row} column {column}"
                            );
                        }
                    }
                }
            }
        }
    }
}
