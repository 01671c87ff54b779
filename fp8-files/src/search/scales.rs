//! The choice of scales.
//!
//! E4M3 has steps that grow with the number: a scale and twice that scale give the same values, except where codes end. So scales over a
//! factor of two show every way in which values can lie between the steps; smaller ones clip the largest values.

use fp8_core::{Cast, Format, Granularity, ScaleGrid, decode_rows, encode_rows};

/// Steps in a factor of two.
const STEPS: i32 = 12;

/// How many of these steps below the scale of the amax are tried.
const CLIPPED: i32 = 4;

/// What the scales of amaxes are multiplied by.
fn factors(granularity: Granularity) -> Vec<f32> {
    match granularity {
        // Powers of two.
        Granularity::Mx => vec![1., 0.5],
        _ => (-CLIPPED..STEPS)
            .map(|i| (i as f32 / STEPS as f32).exp2())
            .collect(),
    }
}

/// Dequant_scales for `values`, a matrix of `grid`: of those around `base`, each the one with the smallest sum of squared rounding errors,
/// where `importance` weighs the columns.
pub(super) fn choose(
    values: &[f32],
    grid: &ScaleGrid,
    granularity: Granularity,
    base: &[f32],
    importance: &[f32],
) -> Vec<f32> {
    let cols = grid.cols().max(1);
    let cast = Cast::new(Format::E4M3).with_division(true);
    let (mut best, mut errors) = (base.to_vec(), vec![f64::INFINITY; base.len()]);
    let (mut codes, mut rounded) = (vec![0u8; cols], vec![0f32; cols]);
    for factor in factors(granularity) {
        // A block of zeros may have a scale that is as small as it can be.
        let scaled = |scale: &f32| Some(scale * factor).filter(|scaled| scaled.is_normal());
        let scales = base.iter().map(|scale| scaled(scale).unwrap_or(*scale));
        let scales: Vec<f32> = scales.collect();
        let mut found = vec![0f64; base.len()];
        for (row, values) in values.chunks_exact(cols).enumerate() {
            encode_rows(&cast, values, row, grid, &scales, &mut codes);
            decode_rows(Format::E4M3, &codes, row, grid, &scales, &mut rounded);
            let width = grid.block_cols().min(cols).max(1);
            for (part, first) in (0..cols).step_by(width).enumerate() {
                let last = cols.min(first + width);
                let mut sum = 0f32;
                for i in first..last {
                    let error = values[i] - rounded[i];
                    sum += importance[i] * error * error;
                }
                found[grid.index(row, 0) + part] += f64::from(sum);
            }
        }
        for (i, error) in found.into_iter().enumerate() {
            if error < errors[i] {
                (errors[i], best[i]) = (error, scales[i]);
            }
        }
    }
    best
}
