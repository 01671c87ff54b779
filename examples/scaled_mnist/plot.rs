//! `scales.svg`: the scale of each tensor over the steps.

use crate::curves::Chart;
use anyhow::Result;
use std::path::Path;

/// A name and points (step, base-2 logarithm of the scale) for each curve.
pub fn write_scales_svg(path: &Path, curves: &[(String, Vec<(f64, f64)>)]) -> Result<()> {
    let exponents = || curves.iter().flat_map(|(_, points)| points).map(|p| p.1);
    let (low, high) = (
        exponents().fold(0., f64::min),
        exponents().fold(0., f64::max),
    );
    let chart = Chart {
        caption: "Scales",
        values: "log2 of the scale",
        range: low - 1.0..high + 1.0,
        curves,
    };
    chart.write(path)
}
