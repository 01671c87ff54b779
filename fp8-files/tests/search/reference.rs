//! The choice of codes as it is published.

use crate::case::{Case, inverse};
use fp8_core::{Cast, Format};
use fp8_files::search::SearchOptions;

/// Optimal brain quantization under given scales, as published: a weight is rounded, the weights that are left move to where the error is
/// smallest, and the inverse loses the weight's row and column. Features go from the largest square to the smallest.
pub fn reference(case: &Case, scales: &[f64], group: usize) -> Vec<f64> {
    let (k, cast) = (case.k, Cast::new(Format::E4M3));
    let own = case.damped(SearchOptions::new().damping);
    let (whole, target) = (inverse(&own), case.target());
    let mut order: Vec<usize> = (0..k).collect();
    order.sort_by(|a, b| own[*a][*a].total_cmp(&own[*b][*b]));
    order.reverse();
    let mut result = vec![0.; case.n * k];
    for row in 0..case.n {
        let mut left = target[row * k..][..k].to_vec();
        let mut inv = whole.clone();
        for &i in &order {
            let scale = scales[row * k.div_ceil(group) + i / group];
            let code = cast.encode((left[i] / scale) as f32, 0);
            let q = f64::from(Format::E4M3.decode(code)) * scale;
            let error = (left[i] - q) / inv[i][i];
            result[row * k + i] = q;
            for j in 0..k {
                left[j] -= error * inv[j][i];
            }
            let removed = inv[i].clone();
            for row in &mut inv {
                let factor = row[i] / removed[i];
                for (x, removed) in row.iter_mut().zip(&removed) {
                    *x -= factor * removed;
                }
            }
        }
    }
    result
}
