//! After the sums: scales, rounding to the output dtype, bias.

#[cfg(target_arch = "x86_64")]
use super::super::shared::Shared;
#[cfg(target_arch = "x86_64")]
use super::results::{Out, Results};
use super::side::Side;
use crate::simd::simd;
use fp8_core::HighPrecision;
use std::mem::MaybeUninit;

/// The scales to apply after the sums, and the bias.
pub(super) struct Epilogue<'a> {
    rows: Scales,
    cols: Scales,
    bias: Option<&'a [f32]>,
}

/// Scales of rows or of columns.
pub(super) enum Scales {
    One(f32),
    Each(Vec<f32>),
}

impl Scales {
    fn new(side: &Side<'_>, applied: bool) -> Self {
        match side.dequant_scales {
            _ if applied => Self::One(1.),
            &[scale] => Self::One(scale),
            _ => {
                let mut scales = vec![0.; side.kept()];
                if !scales.is_empty() && side.contracted() > 0 {
                    side.scales_into(0, 0, &mut scales);
                }
                Self::Each(scales)
            }
        }
    }
}

impl<'a> Epilogue<'a> {
    /// From the operands, each with whether the sums already include its scales.
    pub(super) fn new(
        (a, a_applied): (&Side<'_>, bool),
        (b, b_applied): (&Side<'_>, bool),
        bias: Option<&'a [f32]>,
    ) -> Self {
        Self {
            rows: Scales::new(a, a_applied),
            cols: Scales::new(b, b_applied),
            bias,
        }
    }

    /// What tiles need to write `cols` columns of results themselves, if they can.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn results<'r, T: HighPrecision>(
        &'r self,
        cols: usize,
        out: Shared<'r, MaybeUninit<T>>,
    ) -> Option<Results<'r>> {
        let extreme = match &self.rows {
            Scales::One(scale) => is_extreme(*scale),
            Scales::Each(scales) => scales.iter().any(|&scale| is_extreme(scale)),
        };
        let out = match out.of_type() {
            Some(out) => Out::F32(out),
            None => Out::Bf16(out.of_type()?),
        };
        (!extreme).then_some(Results {
            out,
            cols,
            row_scales: &self.rows,
            col_scales: &self.cols,
            bias: self.bias,
        })
    }

    /// Columns of row `row` from `first` on: `sums` scaled and rounded, with the bias added in the output dtype.
    pub(super) fn finish_row<T: HighPrecision>(
        &self,
        row: usize,
        first: usize,
        sums: &[f32],
        out: &mut [MaybeUninit<T>],
    ) {
        let row_scale = match &self.rows {
            Scales::One(scale) => *scale,
            Scales::Each(scales) => scales[row],
        };
        let extreme = is_extreme(row_scale);
        let exact = |sum: f32, col_scale: f32| scaled_in_f64(sum, row_scale, col_scale);
        let cols = first..first + out.len();
        let bias = self.bias.map(|bias| &bias[cols.clone()]);
        match &self.cols {
            Scales::One(scale) if extreme => {
                finish(sums, bias, out, |_, sum| exact(sum, *scale));
            }
            Scales::One(scale) => {
                let scale = *scale;
                finish(
                    sums,
                    bias,
                    out,
                    #[inline(always)]
                    |_, sum| sum * row_scale * scale,
                );
            }
            Scales::Each(scales) => {
                let scales = &scales[cols];
                if extreme {
                    finish(sums, bias, out, |col, sum| exact(sum, scales[col]));
                } else {
                    let scales = &scales[..out.len()];
                    finish(
                        sums,
                        bias,
                        out,
                        #[inline(always)]
                        |col, sum| sum * row_scale * scales[col],
                    );
                }
            }
        }
    }
}

/// Values that are rounded at a time: in registers and the nearest cache, and enough for a conversion that is called.
const PIECE: usize = 128;

#[inline(always)]
fn finish<T: HighPrecision>(
    sums: &[f32],
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
    scaled: impl Fn(usize, f32) -> f32,
) {
    let sums = &sums[..out.len()];
    if size_of::<T>() >= size_of::<f32>() {
        // Nothing to round.
        return simd(
            #[inline(always)]
            || match bias {
                None => {
                    for (col, (out, &sum)) in out.iter_mut().zip(sums).enumerate() {
                        out.write(T::from_f32(scaled(col, sum)));
                    }
                }
                Some(bias) => {
                    let bias = &bias[..out.len()];
                    for (col, (out, &sum)) in out.iter_mut().zip(sums).enumerate() {
                        out.write(T::from_f32(scaled(col, sum) + bias[col]));
                    }
                }
            },
        );
    }
    simd(
        #[inline(always)]
        || {
            let (mut wide, mut narrow) = ([0f32; PIECE], [T::default(); PIECE]);
            let pieces = out.chunks_mut(PIECE).zip(sums.chunks(PIECE));
            for (piece, (out, sums)) in pieces.enumerate() {
                let (wide, narrow) = (&mut wide[..sums.len()], &mut narrow[..sums.len()]);
                let first = piece * PIECE;
                for (i, (wide, &sum)) in wide.iter_mut().zip(sums).enumerate() {
                    *wide = scaled(first + i, sum);
                }
                T::narrow(wide, narrow);
                if let Some(bias) = bias {
                    let bias = &bias[first..first + sums.len()];
                    for ((wide, narrow), &bias) in wide.iter_mut().zip(&*narrow).zip(bias) {
                        *wide = narrow.to_f32() + bias;
                    }
                    T::narrow(wide, narrow);
                }
                for (out, &narrow) in out.iter_mut().zip(&*narrow) {
                    out.write(narrow);
                }
            }
        },
    );
}

/// `sums += part * row_scales * col_scales`, at the end of one segment of sums with scales that vary along the sum.
pub(super) fn merge_segment(
    part: &[f32],
    row_scales: &[f32],
    col_scales: &[f32],
    sums: &mut [f32],
) {
    let cols = col_scales.len();
    for ((part, sums), &row_scale) in part
        .chunks_exact(cols)
        .zip(sums.chunks_exact_mut(cols))
        .zip(row_scales)
    {
        if is_extreme(row_scale) {
            for ((sum, &part), &col_scale) in sums.iter_mut().zip(part).zip(col_scales) {
                *sum += scaled_in_f64(part, row_scale, col_scale);
            }
        } else {
            simd(
                #[inline(always)]
                || {
                    for ((sum, &part), &col_scale) in sums.iter_mut().zip(part).zip(col_scales) {
                        *sum += part * row_scale * col_scale;
                    }
                },
            );
        }
    }
}

/// The product of two scales can leave the range of f32 although the scaled sum does not, so they are applied one after the
/// other. If the first one is extreme, even that can leave it.
fn is_extreme(row_scale: f32) -> bool {
    row_scale.is_finite() && row_scale.abs() > 1e12 || row_scale.abs() < 1e-12
}

fn scaled_in_f64(sum: f32, row_scale: f32, col_scale: f32) -> f32 {
    (f64::from(sum) * f64::from(row_scale) * f64::from(col_scale)) as f32
}
