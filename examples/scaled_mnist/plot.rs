//! `scales.svg`: the scale of each tensor over the steps, a panel for inputs, weights and gradients each.

use crate::watch::Curve;
use anyhow::{Result, anyhow};
use fp8::atomic::write_atomic;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::path::Path;

/// Colors that color-blind readers can tell apart.
const COLORS: [RGBColor; 5] = [
    RGBColor(213, 94, 0),
    RGBColor(0, 114, 178),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    BLACK,
];
const WIDTH: u32 = 960;
/// Width of the names beside a panel.
const NAMES: u32 = 140;
const TITLE: u32 = 48;
const PANEL: u32 = 230;

/// Replaces the file at `path` by a drawing of panels, each with a title and curves.
pub fn write_scales_svg(path: &Path, panels: &[(String, Vec<Curve>)]) -> Result<()> {
    let mut svg = String::new();
    draw(&mut svg, panels).map_err(|error| anyhow!("drawing {}: {error}", path.display()))?;
    Ok(write_atomic(path, |out| out.write_all(svg.as_bytes()))?)
}

fn draw(
    svg: &mut String,
    panels: &[(String, Vec<Curve>)],
) -> Result<(), Box<dyn std::error::Error>> {
    let points = panels.iter().flat_map(|(_, curves)| curves);
    let points = points.flat_map(|(_, points)| points);
    let steps = points.map(|point| point.0).fold(1., f64::max);
    let size = (WIDTH, TITLE + PANEL * panels.len() as u32);
    let root = SVGBackend::with_string(svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    let title = "Scales over the steps: data are multiplied by them";
    root.draw(&Text::new(title, (16, 16), ("sans-serif", 20)))?;
    let (_, below) = root.split_vertically(TITLE);
    for (area, (kind, curves)) in below.split_evenly((panels.len(), 1)).iter().zip(panels) {
        draw_panel(area, kind, curves, steps)?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    kind: &str,
    curves: &[Curve],
    steps: f64,
) -> Result<(), Box<dyn std::error::Error>> {
    let (left, right) = area.split_horizontally(WIDTH - NAMES);
    let exponents = || curves.iter().flat_map(|(_, points)| points).map(|p| p.1);
    let low = exponents().fold(f64::INFINITY, f64::min).min(1e9);
    let high = exponents().fold(f64::NEG_INFINITY, f64::max).max(low);
    let mut chart = ChartBuilder::on(&left)
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(72)
        .build_cartesian_2d(0f64..steps, low - 1.0..high + 1.0)?;
    chart
        .configure_mesh()
        .x_desc("step")
        .y_desc(kind)
        .x_labels(8)
        .y_labels(5)
        .x_label_formatter(&|step| format!("{step:.0}"))
        // Scales are powers of two: label whole exponents only.
        .y_label_formatter(&|exponent| match exponent.fract() {
            0. => format!("2^{exponent}"),
            _ => String::new(),
        })
        .label_style(("sans-serif", 14))
        .axis_desc_style(("sans-serif", 16))
        .light_line_style(WHITE)
        .draw()?;
    for (i, (name, points)) in curves.iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        // Equal scales overlap: the curve drawn first is wider and stays visible on both sides.
        let width = 2 + 3 * (curves.len() - 1 - i) as u32;
        chart.draw_series(LineSeries::new(stairs(points), color.stroke_width(width)))?;
        let y = 24 + 24 * i as i32;
        let line = PathElement::new([(0, y), (24, y)], color.stroke_width(3));
        right.draw(&line)?;
        let style = ("sans-serif", 15).into_font().color(&BLACK);
        let style = style.pos(Pos::new(HPos::Left, VPos::Center));
        right.draw(&Text::new(name.as_str(), (32, y), style))?;
    }
    Ok(())
}

/// Steps: a scale is constant until the next one.
fn stairs(points: &[(f64, f64)]) -> impl Iterator<Item = (f64, f64)> {
    let corners = points.windows(2).map(|pair| (pair[1].0, pair[0].1));
    points.first().copied().into_iter().chain(
        corners
            .zip(points.iter().skip(1).copied())
            .flat_map(|(corner, point)| [corner, point]),
    )
}
