//! Casts and amaxes over threads: a matrix is split at whole rows, and `fp8-core` gives the same bits for every
//! split.

use super::data::{Floats, for_floats, tensor, with_f32};
use super::fill::{filled, zeros};
use super::pages;
use crate::base::error::{Error, Result};
use crate::base::parallel::tasks;
use candle_core::{CpuStorage, DType, Tensor};
use fp8_core::{Cast, Format, HighPrecision, ScaleGrid};
use half::{bf16, f16};
use std::sync::atomic::{AtomicU32, Ordering};

/// Elements per task: large enough to hide the cost of starting it, small enough to balance the load.
const TASK: usize = 1 << 15;

/// Amaxes of many scales are found in at most this many runs of rows.
const RUNS: usize = 32;

/// Elements of the whole rows that make one task.
fn task_len(cols: usize) -> usize {
    cols.max(1) * (TASK / cols.max(1)).max(1)
}

/// The larger of two amaxes. Magnitudes have the order of their bits, with NaN on top.
fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

/// Largest magnitude per scale of `grid`.
pub(super) fn amax(src: Floats<'_>, grid: &ScaleGrid) -> Vec<f32> {
    fn run<T: HighPrecision>(src: &[T], grid: &ScaleGrid) -> Vec<f32> {
        let len = task_len(grid.cols());
        if src.len() <= len {
            let mut out = vec![0f32; grid.len()];
            fp8_core::amax_rows(src, 0, grid, &mut out);
            return out;
        }
        if grid.len() == 1 {
            let amax = AtomicU32::new(0);
            tasks::for_each(src.len().div_ceil(len), |index| {
                let src = &src[index * len..src.len().min((index + 1) * len)];
                let mut part = [0f32];
                fp8_core::amax_rows(src, index * len / grid.cols(), grid, &mut part);
                amax.fetch_max(part[0].to_bits(), Ordering::Relaxed);
            });
            return vec![f32::from_bits(amax.into_inner())];
        }
        // A few runs of tasks, each with amaxes of its own: a grid may be as large as a row.
        let per_run = src.len().div_ceil(len).div_ceil(RUNS) * len;
        let runs = crate::base::parallel::map(src.chunks(per_run).enumerate(), |(index, src)| {
            let mut out = vec![0f32; grid.len()];
            fp8_core::amax_rows(src, index * per_run / grid.cols(), grid, &mut out);
            out
        });
        let mut all = vec![0f32; grid.len()];
        for run in runs {
            all.iter_mut()
                .zip(&run)
                .for_each(|(all, &amax)| *all = larger(*all, amax));
        }
        all
    }
    for_floats!(src, src => run(src, grid))
}

/// Codes of `src * quant_scale`; with `want_amax` also the amax of `src` from the same read.
pub(super) fn encode(
    src: Floats<'_>,
    grid: &ScaleGrid,
    quant_scales: &[f32],
    cast: &Cast,
    want_amax: bool,
) -> (Vec<u8>, f32) {
    fn run<T: HighPrecision>(
        src: &[T],
        grid: &ScaleGrid,
        quant_scales: &[f32],
        cast: &Cast,
        want_amax: bool,
    ) -> (Vec<u8>, f32) {
        let mut codes = pages::vec_for(src.len());
        let room = &mut codes.spare_capacity_mut()[..src.len()];
        let len = task_len(grid.cols());
        // The bits of magnitudes have the order of their values, with NaN on top.
        let amax = AtomicU32::new(0);
        tasks::for_each_chunk(src, room, len, |index, src, codes| {
            let codes = zeros(0, codes);
            let first_row = index * len / grid.cols();
            if want_amax {
                let part = fp8_core::encode_rows_with_amax(
                    cast,
                    src,
                    first_row,
                    grid,
                    quant_scales,
                    codes,
                );
                amax.fetch_max(part.to_bits(), Ordering::Relaxed);
            } else {
                fp8_core::encode_rows(cast, src, first_row, grid, quant_scales, codes);
            }
        });
        let amax = f32::from_bits(amax.into_inner());
        // SAFETY: the tasks have written every code.
        unsafe { codes.set_len(src.len()) };
        (codes, amax)
    }
    for_floats!(src, src => run(src, grid, quant_scales, cast, want_amax))
}

/// Elements that are made and cast at a time: they stay in the core's own cache.
const PIECE: usize = 1 << 12;

/// Codes, one row behind the other, and the amax of a matrix that `fill(start, rows)` writes into memory of the task.
pub(crate) fn encode_filled<T: HighPrecision>(
    grid: &ScaleGrid,
    quant_scale: &Tensor,
    cast: &Cast,
    fill: impl Fn(usize, &mut [T]) + Sync,
) -> Result<(Tensor, f32)> {
    crate::base::simd::check()?;
    let (cols, len) = (grid.cols().max(1), grid.rows() * grid.cols());
    let piece = cols * (PIECE / cols).max(1);
    let (codes, amaxes) = with_f32("quantize", quant_scale, |scales| {
        Ok(filled(0u8, len, task_len(cols), |start, codes| {
            let (mut values, mut amax) = (vec![T::default(); piece.min(codes.len())], 0f32);
            for (index, codes) in codes.chunks_mut(piece).enumerate() {
                let (start, values) = (start + index * piece, &mut values[..codes.len()]);
                fill(start, values);
                let row = start / cols;
                let part = fp8_core::encode_rows_with_amax(cast, values, row, grid, scales, codes);
                amax = larger(amax, part);
            }
            amax
        }))
    })?;
    let amax = amaxes.into_iter().fold(0., larger);
    Ok((tensor(CpuStorage::U8(codes), len)?, amax))
}

/// `decode(codes) * dequant_scale` in `dtype`.
pub(super) fn decode(
    format: Format,
    codes: &[u8],
    grid: &ScaleGrid,
    dequant_scales: &[f32],
    dtype: DType,
) -> Result<CpuStorage> {
    fn run<T: HighPrecision + Default>(
        format: Format,
        codes: &[u8],
        grid: &ScaleGrid,
        dequant_scales: &[f32],
    ) -> Vec<T> {
        let mut values = pages::vec_for::<T>(codes.len());
        let room = &mut values.spare_capacity_mut()[..codes.len()];
        let len = task_len(grid.cols());
        tasks::for_each_chunk(codes, room, len, |index, codes, values| {
            let values = zeros(T::default(), values);
            let first_row = index * len / grid.cols();
            fp8_core::decode_rows(format, codes, first_row, grid, dequant_scales, values);
        });
        // SAFETY: the tasks have written every value.
        unsafe { values.set_len(codes.len()) };
        values
    }
    Ok(match dtype {
        DType::F32 => CpuStorage::F32(run(format, codes, grid, dequant_scales)),
        DType::BF16 => CpuStorage::BF16(run::<bf16>(format, codes, grid, dequant_scales)),
        DType::F16 => CpuStorage::F16(run::<f16>(format, codes, grid, dequant_scales)),
        DType::F64 => CpuStorage::F64(run(format, codes, grid, dequant_scales)),
        got => {
            let expected = "f32, bf16, f16 or f64";
            return Err(Error::DType {
                op: "dequantize",
                what: "the output",
                expected,
                got,
            });
        }
    })
}

/// Codes to f32 without scales, into `values`.
pub(super) fn decode_unscaled(format: Format, codes: &[u8], values: &mut [f32]) {
    tasks::for_each_chunk(codes, values, TASK, |_, codes, values| {
        fp8_core::decode(format, codes, 1., values);
    });
}
