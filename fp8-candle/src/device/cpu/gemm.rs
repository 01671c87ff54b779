//! FP8 GEMM: codes are decoded to f32 in slabs, multiplied by the `gemm` crate, scaled in the epilogue.
//!
//! Every FP8 value is exact in f32, so the slabs lose nothing. The order of every sum depends on the sizes alone,
//! not on the number of threads.

use super::cast::decode_unscaled;
use super::data::{narrow, with_codes, with_f32};
use crate::device::{GemmOperand, GemmOutput};
use candle_core::{CpuStorage, DType, Result};
use fp8_core::{Contraction, Format, ScaleGrid};
use half::{bf16, f16};
use rayon::prelude::*;

/// Elements of a decoded slab: 4 MiB of f32, near the size of a second-level cache.
const SLAB: usize = 1 << 20;

/// The codes of one operand on the host.
struct Side<'a> {
    codes: &'a [u8],
    scales: &'a [f32],
    format: Format,
    grid: ScaleGrid,
    contraction: Contraction,
    /// Scales that vary along the contraction cannot wait for the epilogue.
    scale_in_decode: bool,
}

impl<'a> Side<'a> {
    fn new(operand: &GemmOperand<'_>, codes: &'a [u8], scales: &'a [f32]) -> Self {
        let grid = operand.grid;
        let along = match operand.contraction {
            Contraction::Cols => grid.scale_cols(),
            Contraction::Rows => grid.scale_rows(),
        };
        Self {
            codes,
            scales,
            format: operand.format,
            grid,
            contraction: operand.contraction,
            scale_in_decode: along > 1,
        }
    }

    /// Decodes `rows` of the matrix into `slab`.
    fn decode(&self, rows: std::ops::Range<usize>, slab: &mut Vec<f32>) {
        let cols = self.grid.cols();
        let codes = &self.codes[rows.start * cols..rows.end * cols];
        // Old contents are overwritten; only growth needs zeros.
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

    /// dequant_scales per kept index (or one for all); None when they are already in the slab.
    fn epilogue(&self) -> &[f32] {
        if self.scale_in_decode {
            &[]
        } else {
            self.scales
        }
    }

    /// Scale of kept index `index` in the epilogue.
    fn block(&self) -> usize {
        match self.contraction {
            Contraction::Cols => self.grid.block_rows(),
            Contraction::Rows => self.grid.block_cols(),
        }
    }
}

/// `[a.kept, b.kept]`, see [`crate::device::Backend::gemm`].
pub(super) fn gemm(
    a: &GemmOperand<'_>,
    b: &GemmOperand<'_>,
    out: &GemmOutput<'_>,
) -> Result<CpuStorage> {
    const OP: &str = "fp8 gemm";
    let (m, n) = (a.kept(), b.kept());
    let bias = match out.bias {
        None => None,
        Some(bias) => Some(
            bias.to_dtype(out.dtype)?
                .to_dtype(DType::F32)?
                .to_vec1::<f32>()?,
        ),
    };
    with_codes(OP, a.codes, |a_codes| {
        with_f32(OP, a.dequant_scale, |a_scales| {
            with_codes(OP, b.codes, |b_codes| {
                with_f32(OP, b.dequant_scale, |b_scales| {
                    let a = Side::new(a, a_codes, a_scales);
                    let b = Side::new(b, b_codes, b_scales);
                    let mut y = vec![0f32; m * n];
                    products(&a, &b, m, n, &mut y);
                    epilogue(&a, &b, n, &mut y, bias.as_deref(), out.dtype);
                    narrow(OP, y, out.dtype)
                })
            })
        })
    })
}

/// Unscaled products into `y`, `[m, n]` zeros.
fn products(a: &Side<'_>, b: &Side<'_>, m: usize, n: usize, y: &mut [f32]) {
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

/// `y * a_scale * b_scale`, rounded to the output dtype, plus bias in that dtype.
fn epilogue(
    a: &Side<'_>,
    b: &Side<'_>,
    n: usize,
    y: &mut [f32],
    bias: Option<&[f32]>,
    dtype: DType,
) {
    if n == 0 {
        return;
    }
    let (a_scales, b_scales) = (a.epilogue(), b.epilogue());
    let b_block = b.block();
    // One multiplier per column; the row's multiplier is applied apart, since the product of the two can leave the
    // range of f32 where the scaled sum does not.
    let columns: Vec<f32> = match b_scales {
        [] => vec![1.; n],
        scales => (0..n)
            .map(|col| scales[(col / b_block).min(scales.len() - 1)])
            .collect(),
    };
    let round = |value: f32| match dtype {
        DType::BF16 => bf16::from_f32(value).to_f32(),
        DType::F16 => f16::from_f32(value).to_f32(),
        _ => value,
    };
    let rows_per_task = (SLAB / 32 / n).max(1);
    y.par_chunks_mut(rows_per_task * n)
        .enumerate()
        .for_each(|(task, chunk)| {
            for (row, y) in chunk.chunks_mut(n).enumerate() {
                let row = task * rows_per_task + row;
                let row_scale = match a_scales {
                    [] => 1.,
                    scales => scales[(row / a.block()).min(scales.len() - 1)],
                };
                scale_row(y, row_scale, &columns);
                if let Some(bias) = bias {
                    match dtype {
                        DType::F32 | DType::F64 => {
                            y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
                        }
                        _ => y
                            .iter_mut()
                            .zip(bias)
                            .for_each(|(y, bias)| *y = round(*y) + bias),
                    }
                }
            }
        });
}

/// Multiplies by the smaller factor last when both are large, first when one is tiny: no intermediate overflow.
fn scale_row(y: &mut [f32], row_scale: f32, columns: &[f32]) {
    if row_scale.is_finite() && row_scale.abs() > 1e12 || row_scale.abs() < 1e-12 {
        let row_scale = f64::from(row_scale);
        for (y, &column) in y.iter_mut().zip(columns) {
            *y = (f64::from(*y) * row_scale * f64::from(column)) as f32;
        }
    } else {
        for (y, &column) in y.iter_mut().zip(columns) {
            *y = *y * row_scale * column;
        }
    }
}
