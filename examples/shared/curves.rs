//! Curves over the steps of a run, as an SVG file.

use anyhow::{Result, anyhow};
use fp8::atomic::write_atomic;
use plotters::prelude::*;
use std::ops::Range;
use std::path::Path;

/// A drawing of curves.
pub struct Chart<'a> {
    pub caption: &'a str,
    /// The label of the values.
    pub values: &'a str,
    /// The values that are shown.
    pub range: Range<f64>,
    /// A name and points (step, value) for each curve.
    pub curves: &'a [(String, Vec<(f64, f64)>)],
}

impl Chart<'_> {
    /// Replaces the file at `path`.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut svg = String::new();
        self.draw(&mut svg)
            .map_err(|error| anyhow!("drawing {}: {error}", path.display()))?;
        Ok(write_atomic(path, |out| out.write_all(svg.as_bytes()))?)
    }

    fn draw(&self, svg: &mut String) -> Result<(), Box<dyn std::error::Error>> {
        let points = self.curves.iter().flat_map(|(_, points)| points);
        let steps = points.map(|point| point.0).fold(1., f64::max);
        let root = SVGBackend::with_string(svg, (960, 600)).into_drawing_area();
        root.fill(&WHITE)?;
        let mut chart = ChartBuilder::on(&root)
            .caption(self.caption, ("sans-serif", 22))
            .margin(16)
            .x_label_area_size(48)
            .y_label_area_size(64)
            .build_cartesian_2d(0f64..steps, self.range.clone())?;
        chart
            .configure_mesh()
            .x_desc("step")
            .y_desc(self.values)
            .light_line_style(BLACK.mix(0.05))
            .draw()?;
        for (i, (name, points)) in self.curves.iter().enumerate() {
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
}
