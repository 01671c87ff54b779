//! FP8 GEMM on f32 units: codes are decoded to f32 in slabs, multiplied by the `gemm` crate, scaled at the end.
//!
//! Every FP8 value is exact in f32, so the slabs lose nothing. The order of every sum depends only on the sizes, not on the
//! number of threads.

use super::super::cast::decode_unscaled;
use super::epilogue::Epilogue;
use super::layout::unpack_codes;
use super::scratch::Scratch;
use super::side::{Codes, Side};
use fp8_core::{Contraction, Format, HighPrecision, ScaleGrid};
use rayon::prelude::*;
use std::borrow::Cow;
use std::mem::MaybeUninit;

/// Elements of a decoded slab: 4 MiB of f32, near the size of a second-level cache.
const SLAB: usize = 1 << 20;

/// An operand whose codes are row-major.
struct Slabs<'a> {
    codes: Cow<'a, [u8]>,
    scales: &'a [f32],
    format: Format,
    grid: ScaleGrid,
    contraction: Contraction,
    scale_in_decode: bool,
}

/// Whether to scale while decoding: scales that vary along the contraction cannot wait for the epilogue. Then not those of the
/// other operand either: products of values and codes can leave the range of f32 although those of values do not.
fn scale_in_decode(a: &Side<'_>, b: &Side<'_>) -> bool {
    a.segment().is_some() || b.segment().is_some()
}

impl<'a> Slabs<'a> {
    fn new(side: &Side<'a>, scale_in_decode: bool) -> Self {
        Self {
            codes: match side.codes {
                Codes::RowMajor(codes) => codes.into(),
                Codes::Panels(order, codes) => {
                    unpack_codes(order, codes, side.kept(), side.contracted()).into()
                }
            },
            scales: side.dequant_scales,
            format: side.format,
            grid: side.grid,
            contraction: side.contraction,
            scale_in_decode,
        }
    }

    /// Decodes `rows` of the matrix into `slab`.
    fn decode(&self, rows: std::ops::Range<usize>, slab: &mut Vec<f32>) {
        let cols = self.grid.cols();
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
                    fp8_core::decode_rows(self.format, codes, first, &self.grid, self.scales, slab);
                });
        } else {
            decode_unscaled(self.format, codes, slab);
        }
    }

    /// (stride along the kept dimension, stride along the contraction).
    fn strides(&self) -> (isize, isize) {
        match self.contraction {
            Contraction::Cols => (self.grid.cols() as isize, 1),
            Contraction::Rows => (1, self.grid.cols() as isize),
        }
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
    let (a_slabs, b_slabs) = (Slabs::new(a, scaled), Slabs::new(b, scaled));
    let mut sums = Scratch::<f32>::new(m * n);
    if a.contracted() == 0 {
        sums.fill(0.);
    }
    products(&a_slabs, &b_slabs, m, n, &mut sums);
    finish(a, b, &sums, bias, out);
}

/// Products into `y`, `[m, n]`, including the scales that vary along the sums.
fn products(a: &Slabs<'_>, b: &Slabs<'_>, m: usize, n: usize, y: &mut [f32]) {
    let k = match a.contraction {
        Contraction::Cols => a.grid.cols(),
        Contraction::Rows => a.grid.rows(),
    };
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    let (mut a_slab, mut b_slab) = (Vec::new(), Vec::new());
    match (a.contraction, b.contraction) {
        // Rows are summed over: slabs along the contraction, accumulated in order.
        (Contraction::Rows, Contraction::Rows) => {
            for k0 in (0..k).step_by(step(m.max(n))) {
                let k1 = (k0 + step(m.max(n))).min(k);
                a.decode(k0..k1, &mut a_slab);
                b.decode(k0..k1, &mut b_slab);
                f32_gemm(
                    (m, n, k1 - k0),
                    y,
                    n,
                    k0 > 0,
                    (&a_slab, a.strides()),
                    (&b_slab, b.strides()),
                );
            }
        }
        (Contraction::Cols, _) => {
            for m0 in (0..m).step_by(step(k)) {
                let m1 = (m0 + step(k)).min(m);
                a.decode(m0..m1, &mut a_slab);
                let y = &mut y[m0 * n..m1 * n];
                match b.contraction {
                    Contraction::Cols => {
                        for n0 in (0..n).step_by(step(k)) {
                            let n1 = (n0 + step(k)).min(n);
                            b.decode(n0..n1, &mut b_slab);
                            let sizes = (m1 - m0, n1 - n0, k);
                            f32_gemm(
                                sizes,
                                &mut y[n0..],
                                n,
                                false,
                                (&a_slab, a.strides()),
                                (&b_slab, b.strides()),
                            );
                        }
                    }
                    Contraction::Rows => {
                        for k0 in (0..k).step_by(step(n)) {
                            let k1 = (k0 + step(n)).min(k);
                            b.decode(k0..k1, &mut b_slab);
                            let sizes = (m1 - m0, n, k1 - k0);
                            f32_gemm(
                                sizes,
                                y,
                                n,
                                k0 > 0,
                                (&a_slab[k0..], a.strides()),
                                (&b_slab, b.strides()),
                            );
                        }
                    }
                }
            }
        }
        (Contraction::Rows, Contraction::Cols) => {
            a.decode(0..k, &mut a_slab);
            for n0 in (0..n).step_by(step(k)) {
                let n1 = (n0 + step(k)).min(n);
                b.decode(n0..n1, &mut b_slab);
                let sizes = (m, n1 - n0, k);
                f32_gemm(
                    sizes,
                    &mut y[n0..],
                    n,
                    false,
                    (&a_slab, a.strides()),
                    (&b_slab, b.strides()),
                );
            }
        }
    }
}

/// Rows of a slab whose rows have `cols` elements.
fn step(cols: usize) -> usize {
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
