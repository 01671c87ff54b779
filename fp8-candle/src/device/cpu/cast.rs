//! Casts and amaxes over threads: a matrix is split at whole rows, and `fp8-core` gives the same bits for every
//! split.

use super::fill::filled_in_pieces;
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks;
use fp8_core::{Cast, Format, HighPrecision, ScaleGrid};
use std::sync::atomic::{AtomicU32, Ordering};

/// Elements per task: large enough to hide the cost of starting it, small enough to balance the load.
const TASK: usize = 1 << 15;

/// Elements that are measured and cast, or written, at a time: they stay in the core's own cache.
const PIECE: usize = 1 << 12;

/// Amaxes of many scales are found in at most this many runs of rows.
const RUNS: usize = 32;

/// Elements of a task, a multiple of `unit`: of a row, or of the rows of a block.
pub(super) fn task_len(unit: usize) -> usize {
    unit.max(1) * (TASK / unit.max(1)).max(1)
}

/// Elements that are cast at a time, a multiple of `unit`.
pub(super) fn piece_len(unit: usize) -> usize {
    unit.max(1) * (PIECE / unit.max(1)).max(1)
}

/// The larger of two amaxes. The bits of magnitudes have the order of their values, with NaN on top.
pub(super) fn larger(a: f32, b: f32) -> f32 {
    f32::from_bits(a.to_bits().max(b.to_bits()))
}

/// Largest magnitude per scale of `grid`.
pub(super) fn amax<T: HighPrecision>(src: &[T], grid: &ScaleGrid) -> Vec<f32> {
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
    // A few runs of tasks, each with its own amaxes: a grid may be as large as a row.
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

/// Codes of `src` with the scales that the cast takes; with `measure` also the amax of `src` from the same read.
pub(super) fn encode<T: HighPrecision>(
    src: &[T],
    grid: &ScaleGrid,
    scales: &[f32],
    cast: &Cast,
    measure: bool,
) -> (Vec<u8>, f32) {
    let amax = AtomicU32::new(0);
    let codes = mapped(src, grid.cols(), |start, src, codes| {
        let row = start / grid.cols();
        if measure {
            let part = fp8_core::encode_rows_with_amax(cast, src, row, grid, scales, codes);
            amax.fetch_max(part.to_bits(), Ordering::Relaxed);
        } else {
            fp8_core::encode_rows(cast, src, row, grid, scales, codes);
        }
    });
    (codes, f32::from_bits(amax.into_inner()))
}

/// The most elements of the rows of one block for [`encode_current`].
pub(super) const LONGEST_RUN: usize = 1 << 18;

/// What [`encode_current`] makes.
pub(super) struct Encoded {
    pub(super) codes: Vec<u8>,
    pub(super) amaxes: Vec<f32>,
    pub(super) quant_scales: Vec<f32>,
    pub(super) dequant_scales: Vec<f32>,
}

/// Codes, scales and amaxes: a task makes all of them for the rows of a few blocks while these are in its core's cache.
/// `scale(amaxes, quant_scales, dequant_scales)` makes scales. `cast` does not round stochastically.
pub(super) fn encode_current<T: HighPrecision>(
    src: &[T],
    grid: &ScaleGrid,
    cast: &Cast,
    scale: impl Fn(&[f32], &mut [f32], &mut [f32]) + Sync,
) -> Encoded {
    let cols = grid.cols().max(1);
    let rows = cols * grid.block_rows();
    let [mut amaxes, mut quant_scales, mut dequant_scales] =
        [(); 3].map(|()| vec![0f32; grid.len()]);
    let all = [&mut amaxes, &mut quant_scales, &mut dequant_scales].map(|x| Shared::new(x));
    let codes = mapped(src, rows, |start, src, codes| {
        let first = start / rows * grid.scale_cols();
        let grid = grid.of_rows(src.len() / cols);
        // SAFETY: each call has its own blocks, hence its own scales.
        let [amaxes, quant_scales, dequant_scales] =
            all.map(|all| unsafe { all.part(first..first + grid.len()) });
        fp8_core::amax_rows(src, 0, &grid, amaxes);
        scale(amaxes, quant_scales, dequant_scales);
        let taken = cast.applied::<[f32]>(quant_scales, dequant_scales);
        fp8_core::encode_rows(cast, src, 0, &grid, taken, codes);
    });
    Encoded {
        codes,
        amaxes,
        quant_scales,
        dequant_scales,
    }
}

/// As many elements as `src` has. `write(start, src, values)` writes some of them, a multiple of `unit`, while their zeros are still in
/// the core's own cache.
fn mapped<A: Sync, B: Copy + Default + Send + Sync>(
    src: &[A],
    unit: usize,
    write: impl Fn(usize, &[A], &mut [B]) + Sync,
) -> Vec<B> {
    let lens = [task_len(unit), piece_len(unit)];
    let (values, _) = filled_in_pieces(B::default(), src.len(), lens, |pieces| {
        for (start, values) in pieces {
            write(start, &src[start..start + values.len()], values);
        }
    });
    values
}

/// `decode(codes) * dequant_scale`.
pub(super) fn decode<T: HighPrecision>(
    format: Format,
    codes: &[u8],
    grid: &ScaleGrid,
    dequant_scales: &[f32],
) -> Vec<T> {
    mapped(codes, grid.cols(), |start, codes, values| {
        let row = start / grid.cols();
        fp8_core::decode_rows(format, codes, row, grid, dequant_scales, values);
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_core::dynamic_quant_scale;

    /// Made a few rows at a time, they are those that whole passes make: amaxes, then scales, then codes.
    #[test]
    fn runs_of_blocks_are_cast_as_in_whole_passes() {
        let format = Format::E4M3;
        let make = |amaxes: &[f32], scales: &mut [f32], inverse: &mut [f32]| {
            for ((scale, inverse), &amax) in scales.iter_mut().zip(inverse).zip(amaxes) {
                *scale = dynamic_quant_scale(amax, format);
                *inverse = -*scale;
            }
        };
        // Several tasks and pieces, the last of them smaller; rows longer than a piece; partial blocks.
        for (rows, cols, block) in [
            (2, 3, (1, 2)),
            (701, 100, (1, 32)),
            (3, 40_000, (1, 128)),
            (9, 64, (1, 64)),
            (701, 100, (32, 1)),
            (70, 3000, (32, 1)),
            (300, 300, (128, 128)),
        ] {
            let mut x: Vec<f32> = (0..rows * cols)
                .map(|i| (i as f32 * 12.9898).sin() * (1 + i % 7) as f32)
                .collect();
            x[cols + 1] = f32::NAN;
            let grid = ScaleGrid::new(rows, cols, block.0, block.1).unwrap();
            let amaxes = amax(&x, &grid);
            let [mut scales, mut inverse] = [(); 2].map(|()| vec![0.; amaxes.len()]);
            make(&amaxes, &mut scales, &mut inverse);
            for (divides, taken) in [(false, &scales), (true, &inverse)] {
                let cast = Cast::new(format).with_division(divides);
                let (codes, _) = encode(&x, &grid, taken, &cast, false);
                let ours = encode_current(&x, &grid, &cast, make);
                assert_eq!(ours.codes, codes, "{rows}x{cols} {divides}");
                let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&ours.quant_scales), bits(&scales));
                assert_eq!(bits(&ours.dequant_scales), bits(&inverse));
                assert_eq!(bits(&ours.amaxes), bits(&amaxes));
            }
        }
    }
}
