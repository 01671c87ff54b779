//! After the sums: scales, rounding to the output dtype, bias.

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use super::results::{Out, Results};
use super::scales::Scales;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::base::parallel::shared::Shared;
use crate::base::simd::simd;
use fp8_core::HighPrecision;
use std::mem::MaybeUninit;
use std::ops::Range;

/// The scales to apply after the sums, and the bias.
pub(in super::super) struct Epilogue<'a> {
    rows: Scales,
    cols: Scales,
    bias: Option<&'a [f32]>,
}

impl<'a> Epilogue<'a> {
    pub(super) fn new(rows: Scales, cols: Scales, bias: Option<&'a [f32]>) -> Self {
        Self { rows, cols, bias }
    }

    /// For operands without scales.
    pub(in super::super) fn unscaled(bias: Option<&'a [f32]>) -> Self {
        Self::new(Scales::NONE, Scales::NONE, bias)
    }

    /// What tiles need to write `cols` columns of results themselves, if they can.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
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
    pub(in super::super) fn finish_row<T: HighPrecision>(
        &self,
        row: usize,
        first: usize,
        sums: &[f32],
        out: &mut [MaybeUninit<T>],
    ) {
        let end = self.row_end(row, first..first + out.len());
        let RowEnd {
            row_scale,
            col_scales,
            bias,
        } = end;
        if is_extreme(row_scale) {
            let exact = move |sum: f32, col_scale: f32| scaled_in_f64(sum, row_scale, col_scale);
            return finish(sums, col_scales, bias, out, exact);
        }
        finish(
            sums,
            col_scales,
            bias,
            out,
            #[inline(always)]
            move |sum, col_scale| sum * row_scale * col_scale,
        );
    }

    /// What happens to the sums of these columns of row `row`.
    pub(super) fn row_end(&self, row: usize, cols: Range<usize>) -> RowEnd<'_> {
        RowEnd {
            row_scale: match &self.rows {
                Scales::One(scale) => *scale,
                Scales::Each(scales) => scales[row],
            },
            col_scales: match &self.cols {
                Scales::One(scale) => ColScales::One(*scale),
                Scales::Each(scales) => ColScales::Each(&scales[cols.clone()]),
            },
            bias: self.bias.map(|bias| &bias[cols]),
        }
    }
}

/// What happens to the sums of some columns of a row, unless its scale [is extreme](is_extreme).
pub(super) struct RowEnd<'a> {
    pub(super) row_scale: f32,
    pub(super) col_scales: ColScales<'a>,
    pub(super) bias: Option<&'a [f32]>,
}

/// Scales of the columns of a row.
#[derive(Clone, Copy)]
pub(super) enum ColScales<'a> {
    One(f32),
    Each(&'a [f32]),
}

/// Values rounded at a time: few enough for the first-level cache, and enough to hide the call of a conversion.
const PIECE: usize = 128;

/// The closures capture by value, so the compiler knows that `out` overlaps nothing they read, and zipped slices need no
/// bounds checks: these loops vectorize completely.
#[inline(always)]
fn finish<T: HighPrecision>(
    sums: &[f32],
    cols: ColScales<'_>,
    bias: Option<&[f32]>,
    out: &mut [MaybeUninit<T>],
    scaled: impl Fn(f32, f32) -> f32,
) {
    let sums = &sums[..out.len()];
    if size_of::<T>() >= size_of::<f32>() {
        // Nothing to round.
        return simd(
            #[inline(always)]
            move || {
                let pairs = out.iter_mut().zip(sums);
                match (cols, bias) {
                    (ColScales::One(scale), None) => {
                        for (out, &sum) in pairs {
                            out.write(T::from_f32(scaled(sum, scale)));
                        }
                    }
                    (ColScales::One(scale), Some(bias)) => {
                        for ((out, &sum), &bias) in pairs.zip(bias) {
                            out.write(T::from_f32(scaled(sum, scale) + bias));
                        }
                    }
                    (ColScales::Each(scales), None) => {
                        for ((out, &sum), &scale) in pairs.zip(scales) {
                            out.write(T::from_f32(scaled(sum, scale)));
                        }
                    }
                    (ColScales::Each(scales), Some(bias)) => {
                        for (((out, &sum), &scale), &bias) in pairs.zip(scales).zip(bias) {
                            out.write(T::from_f32(scaled(sum, scale) + bias));
                        }
                    }
                }
            },
        );
    }
    simd(
        #[inline(always)]
        move || {
            let (mut wide, mut narrow) = ([0f32; PIECE], [T::default(); PIECE]);
            let pieces = out.chunks_mut(PIECE).zip(sums.chunks(PIECE));
            for (piece, (out, sums)) in pieces.enumerate() {
                let (wide, narrow) = (&mut wide[..sums.len()], &mut narrow[..sums.len()]);
                let piece = piece * PIECE..piece * PIECE + sums.len();
                let pairs = wide.iter_mut().zip(sums);
                match cols {
                    ColScales::One(scale) => {
                        for (wide, &sum) in pairs {
                            *wide = scaled(sum, scale);
                        }
                    }
                    ColScales::Each(scales) => {
                        for ((wide, &sum), &scale) in pairs.zip(&scales[piece.clone()]) {
                            *wide = scaled(sum, scale);
                        }
                    }
                }
                T::narrow(wide, narrow);
                if let Some(bias) = bias {
                    for ((wide, narrow), &bias) in wide.iter_mut().zip(&*narrow).zip(&bias[piece]) {
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
                move || {
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
pub(super) fn is_extreme(row_scale: f32) -> bool {
    row_scale.is_finite() && row_scale.abs() > 1e12 || row_scale.abs() < 1e-12
}

#[inline(always)]
fn scaled_in_f64(sum: f32, row_scale: f32, col_scale: f32) -> f32 {
    (f64::from(sum) * f64::from(row_scale) * f64::from(col_scale)) as f32
}
