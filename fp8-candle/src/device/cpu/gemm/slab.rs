//! FP8 GEMM on f32 units: codes are decoded to f32 in slabs, multiplied by the `gemm` crate, scaled at the end.
//!
//! Every FP8 value is exact in f32, so the slabs lose nothing. The order of every sum depends only on the sizes, not on the
//! number of threads.

use super::super::cast::decode_unscaled;
use super::super::scratch::Scratch;
use super::epilogue::Epilogue;
use super::layout::unpack_codes;
use super::side::{Codes, Side};
use fp8_core::{Contraction, HighPrecision};
use rayon::prelude::*;
use std::borrow::Cow;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Elements of a decoded slab: 4 MiB of f32, near the size of a second-level cache.
const SLAB: usize = 1 << 20;

/// An operand whose codes are row-major, and the slab of it that was decoded last.
struct Slabs<'a> {
    codes: Cow<'a, [u8]>,
    side: &'a Side<'a>,
    scale_in_decode: bool,
    rows: Range<usize>,
    slab: Vec<f32>,
}

/// Whether to scale while decoding: scales that vary along the sum cannot wait for the epilogue. Then neither can those of the
/// other operand: products of values and codes can leave the range of f32 although those of values do not.
fn scale_in_decode(a: &Side<'_>, b: &Side<'_>) -> bool {
    a.segment().is_some() || b.segment().is_some()
}

impl<'a> Slabs<'a> {
    fn new(side: &'a Side<'a>, scale_in_decode: bool) -> Self {
        Self {
            codes: match side.codes {
                Codes::RowMajor(codes) => codes.into(),
                Codes::Panels(order, codes) => {
                    unpack_codes(order, codes, side.kept(), side.contracted()).into()
                }
            },
            side,
            scale_in_decode,
            rows: 0..0,
            slab: Vec::new(),
        }
    }

    /// Decoded values from the first of these indices on, and the strides along the kept dimension and along the sum.
    fn values(&mut self, kept: &Range<usize>, sum: &Range<usize>) -> Strided<'_> {
        let cols = self.side.grid.cols();
        let (rows, first, strides) = match self.side.contraction {
            Contraction::Cols => (kept, sum.start, (cols as isize, 1)),
            Contraction::Rows => (sum, kept.start, (1, cols as isize)),
        };
        if self.rows != *rows {
            self.decode(rows.clone());
        }
        (&self.slab[first..], strides)
    }

    fn decode(&mut self, rows: Range<usize>) {
        let (side, slab) = (self.side, &mut self.slab);
        let (format, grid, cols) = (side.format, &side.grid, side.grid.cols());
        let codes = &self.codes[rows.start * cols..rows.end * cols];
        // Old contents are overwritten; only new elements need a value.
        slab.resize(codes.len(), 0.);
        if self.scale_in_decode {
            let per_task = (SLAB / 32 / cols.max(1)).max(1) * cols.max(1);
            slab.par_chunks_mut(per_task)
                .zip(codes.par_chunks(per_task))
                .enumerate()
                .for_each(|(index, (slab, codes))| {
                    let first = rows.start + index * per_task / cols;
                    fp8_core::decode_rows(format, codes, first, grid, side.dequant_scales, slab);
                });
        } else {
            decode_unscaled(format, codes, slab);
        }
        self.rows = rows;
    }
}

/// `[a.kept, b.kept]` into `out`; every element is written.
pub(super) fn gemm<T: HighPrecision>(
    a: &Side<'_>,
    b: &Side<'_>,
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
) {
    let (m, n) = (a.kept(), b.kept());
    if m == 0 || n == 0 {
        return;
    }
    let scaled = scale_in_decode(a, b);
    let mut sums = Scratch::<f32>::new(m * n);
    match a.contracted() {
        0 => sums.fill(0.),
        k => products(
            Slabs::new(a, scaled),
            Slabs::new(b, scaled),
            (m, n, k),
            &mut sums,
        ),
    }
    finish(a, b, &sums, bias, out);
}

/// Products into `y`, `[m, n]`, including the scales that vary along the sums. Slabs along the sum are added in order.
fn products(mut a: Slabs<'_>, mut b: Slabs<'_>, (m, n, k): (usize, usize, usize), y: &mut [f32]) {
    // How much of m, n and k a slab covers.
    let (m_step, n_step, k_step) = match (a.side.contraction, b.side.contraction) {
        (Contraction::Rows, Contraction::Rows) => (m, n, rows_of_slab(m.max(n))),
        (Contraction::Cols, Contraction::Cols) => (rows_of_slab(k), rows_of_slab(k), k),
        (Contraction::Cols, Contraction::Rows) => (rows_of_slab(k), n, rows_of_slab(n)),
        (Contraction::Rows, Contraction::Cols) => (m, rows_of_slab(k), k),
    };
    // A slab of an operand that sums along its rows covers the whole sum.
    for rows in parts(m, m_step) {
        for cols in parts(n, n_step) {
            for sum in parts(k, k_step) {
                let sizes = (rows.len(), cols.len(), sum.len());
                let y = &mut y[rows.start * n + cols.start..];
                let (a, b) = (a.values(&rows, &sum), b.values(&cols, &sum));
                f32_gemm(sizes, y, n, sum.start > 0, a, b);
            }
        }
    }
}

/// `0..len` in parts of `step`.
fn parts(len: usize, step: usize) -> impl Iterator<Item = Range<usize>> {
    let starts = (0..len).step_by(step);
    starts.map(move |start| start..len.min(start + step))
}

/// Rows of a slab whose rows have `cols` elements.
fn rows_of_slab(cols: usize) -> usize {
    (SLAB / cols.max(1)).max(64)
}

type Strided<'a> = (&'a [f32], (isize, isize));

/// `y[i * ldy + j] (+)= sum over l of a[i, l] b[j, l]`.
fn f32_gemm(
    (m, n, k): (usize, usize, usize),
    y: &mut [f32],
    ldy: usize,
    accumulate: bool,
    (a, (a_kept, a_sum)): Strided<'_>,
    (b, (b_kept, b_sum)): Strided<'_>,
) {
    let last = |kept: usize, strides: (isize, isize)| {
        (kept - 1) * strides.0 as usize + (k - 1) * strides.1 as usize
    };
    assert!(m > 0 && n > 0 && k > 0);
    assert!(last(m, (a_kept, a_sum)) < a.len() && last(n, (b_kept, b_sum)) < b.len());
    assert!((m - 1) * ldy + n <= y.len() && n <= ldy);
    let threads = rayon::current_num_threads();
    let parallelism = if threads > 1 {
        gemm::Parallelism::Rayon(threads)
    } else {
        gemm::Parallelism::None
    };
    // SAFETY: the assertions above bound every element that the strides reach, in `a`, `b` and `y`; `y` is
    // borrowed exclusively and f32 is one of the element types that `gemm` takes.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            y.as_mut_ptr(),
            1,
            ldy as isize,
            accumulate,
            a.as_ptr(),
            a_sum,
            a_kept,
            b.as_ptr(),
            b_kept,
            b_sum,
            1.0f32,
            1.0f32,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// Applies the scales that the slabs do not include, rounds, and adds the bias.
fn finish<T: HighPrecision>(
    a: &Side<'_>,
    b: &Side<'_>,
    sums: &[f32],
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
) {
    let n = b.kept();
    let epilogue = Epilogue::new((a, scale_in_decode(a, b)), (b, scale_in_decode(a, b)), bias);
    let rows_per_task = (SLAB / 32 / n).max(1);
    out.par_chunks_mut(rows_per_task * n)
        .zip(sums.par_chunks(rows_per_task * n))
        .enumerate()
        .for_each(|(task, (out, sums))| {
            for (row, (out, sums)) in out.chunks_mut(n).zip(sums.chunks(n)).enumerate() {
                epilogue.finish_row(task * rows_per_task + row, 0, sums, out);
            }
        });
}
