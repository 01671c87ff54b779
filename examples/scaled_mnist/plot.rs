//! `scales.svg`: the scale of each tensor over the steps.

use anyhow::{Result, anyhow};
use fp8::atomic::write_atomic;
use plotters::prelude::*;
use std::path::Path;

/// A name and points (step, base-2 logarithm of the scale) for each curve.
pub fn write_scales_svg(path: &Path, curves: &[(String, Vec<(f64, f64)>)]) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg, curves).map_err(|error| anyhow!("drawing {}: {error}", path.display()))?;
    Ok(write_atomic(path, |out| out.write_all(svg.as_bytes()))?)
}

fn draw(
    svg: &mut String,
    curves: &[(String, Vec<(f64, f64)>)],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = || curves.iter().flat_map(|(_, points)| points);
    let steps = points().map(|p| p.0).fold(1., f64::max);
    let low = points().map(|p| p.1).fold(0., f64::min);
    let high = points().map(|p| p.1).fold(0., f64::max);
    let root = SVGBackend::with_string(svg, (960, 600)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Scales", ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(0f64..steps, low - 1.0..high + 1.0)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("log2 of the scale")
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    for (i, (name, points)) in curves.iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        chart
            .draw_series(LineSeries::new(
                points.iter().copied(),
                color.stroke_width(2),
            ))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], color));
    }
    chart
        .configure_series_labels()
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    root.present()?;
    drop(chart);
    drop(root);
    Ok(())
}
