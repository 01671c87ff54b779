//! `loss.svg`: the training loss of every run.

use anyhow::{Result, anyhow};
use fp8::atomic::write_atomic;
use plotters::prelude::*;
use std::path::Path;

/// Points of a curve, each the mean of as many steps as needed.
const POINTS: usize = 100;

/// A name and a loss per step for each run.
pub fn write_loss_svg(path: &Path, curves: &[(String, Vec<f64>)]) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg, curves).map_err(|error| anyhow!("drawing {}: {error}", path.display()))?;
    Ok(write_atomic(path, |out| out.write_all(svg.as_bytes()))?)
}

fn draw(svg: &mut String, curves: &[(String, Vec<f64>)]) -> Result<(), Box<dyn std::error::Error>> {
    let smooth = |losses: &[f64]| -> Vec<(f64, f64)> {
        let width = losses.len().div_ceil(POINTS).max(1);
        let parts = losses.chunks(width).enumerate();
        let parts = parts.map(|(i, part)| {
            let mean = part.iter().sum::<f64>() / part.len() as f64;
            ((i * width) as f64, mean)
        });
        parts.filter(|(_, loss)| loss.is_finite()).collect()
    };
    let smooth: Vec<_> = curves
        .iter()
        .map(|(name, losses)| (name, smooth(losses)))
        .collect();
    let points = || smooth.iter().flat_map(|(_, points)| points);
    let steps = points().map(|p| p.0).fold(1., f64::max);
    let high = points().map(|p| p.1).fold(0., f64::max);
    let root = SVGBackend::with_string(svg, (960, 600)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption("Training loss", ("sans-serif", 22))
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(0f64..steps, 0f64..high * 1.05 + 1e-6)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc("cross entropy (nats)")
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    for (i, (name, points)) in smooth.into_iter().enumerate() {
        let color = Palette99::pick(i).to_rgba();
        chart
            .draw_series(LineSeries::new(points, color.stroke_width(2)))?
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
