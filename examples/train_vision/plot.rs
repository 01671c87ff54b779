//! `loss.svg`: the training loss of every run.

use crate::curves::Chart;
use anyhow::Result;
use std::path::Path;

/// The most points of a curve; each is the mean of several steps.
const POINTS: usize = 100;

/// `losses`: a name, and the loss of each step, for each run.
pub fn write_loss_svg(path: &Path, losses: &[(String, Vec<f64>)]) -> Result<()> {
    let smooth = |losses: &[f64]| -> Vec<(f64, f64)> {
        let width = losses.len().div_ceil(POINTS).max(1);
        let parts = losses.chunks(width).enumerate();
        let parts = parts.map(|(i, part)| {
            let mean = part.iter().sum::<f64>() / part.len() as f64;
            ((i * width) as f64, mean)
        });
        parts.filter(|(_, loss)| loss.is_finite()).collect()
    };
    let curves: Vec<_> = losses
        .iter()
        .map(|(name, losses)| (name.clone(), smooth(losses)))
        .collect();
    let points = curves.iter().flat_map(|(_, points)| points);
    let high = points.map(|point| point.1).fold(0., f64::max);
    let chart = Chart {
        caption: "Training loss",
        values: "cross entropy (nats)",
        range: 0.0..high * 1.05 + 1e-6,
        curves: &curves,
    };
    chart.write(path)
}
