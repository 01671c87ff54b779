//! `loss.svg`: training and validation loss of every run over its steps.

use super::error::{Error, Result};
use super::metrics::Metrics;
use plotters::prelude::*;

const COLORS: [RGBColor; 6] = [
    RGBColor(31, 119, 180),
    RGBColor(214, 39, 40),
    RGBColor(44, 160, 44),
    RGBColor(148, 103, 189),
    RGBColor(255, 127, 14),
    RGBColor(23, 190, 207),
];
/// Steps that one point of a training curve averages.
const SMOOTHING: usize = 10;

/// An SVG drawing of the losses of the runs `names`, with `unit` as the label of its vertical axis.
///
/// ```
/// use fp8::training::{Metrics, StepRecord, loss_svg};
/// let mut metrics = Metrics::in_memory();
/// metrics.push_step("delayed", &StepRecord::new(1, 2.5))?;
/// assert!(loss_svg(&metrics, &["delayed"], "nats")?.contains("delayed"));
/// # Ok::<(), fp8::training::Error>(())
/// ```
///
/// # Errors
/// [`Error::Plot`] without a finite loss.
pub fn loss_svg<S: AsRef<str>>(metrics: &Metrics, names: &[S], unit: &str) -> Result<String> {
    let mut svg = String::new();
    let names: Vec<&str> = names.iter().map(AsRef::as_ref).collect();
    draw(&mut svg, metrics, &names, unit).map_err(|error| Error::Plot {
        reason: error.to_string(),
    })?;
    Ok(svg)
}

fn draw(
    svg: &mut String,
    metrics: &Metrics,
    names: &[&str],
    unit: &str,
) -> Result<(), Box<dyn std::error::Error>> {
    let curves: Vec<_> = names
        .iter()
        .map(|name| {
            let mut curves = [metrics.train_curve(name), metrics.validation_curve(name)];
            // A curve has a gap where a loss was not finite.
            for curve in &mut curves {
                curve.retain(|point| point.1.is_finite());
            }
            let [train, validation] = curves;
            (*name, smooth(&train), validation)
        })
        .collect();
    let points = || {
        curves.iter().flat_map(|(_, train, validation)| {
            train
                .iter()
                .copied()
                .chain(validation.iter().map(|&(step, loss)| (step as f64, loss)))
        })
    };
    let steps = points().map(|p| p.0).fold(1., f64::max);
    let low = points().map(|p| p.1).fold(f64::INFINITY, f64::min);
    let high = points().map(|p| p.1).fold(f64::NEG_INFINITY, f64::max);
    if !(low.is_finite() && high.is_finite()) {
        return Err("none is finite".into());
    }
    let margin = 0.05 * (high - low).max(0.1);

    let root = SVGBackend::with_string(svg, (960, 600)).into_drawing_area();
    root.fill(&WHITE)?;
    let mut chart = ChartBuilder::on(&root)
        .caption(
            "Loss: training (thin), validation (marked)",
            ("sans-serif", 22),
        )
        .margin(16)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(0f64..steps, low - margin..high + margin)?;
    chart
        .configure_mesh()
        .x_desc("optimizer step")
        .x_label_formatter(&|step| format!("{step:.0}"))
        .y_desc(unit)
        .label_style(("sans-serif", 15))
        .axis_desc_style(("sans-serif", 17))
        .light_line_style(BLACK.mix(0.05))
        .draw()?;
    for (i, (name, train, validation)) in curves.into_iter().enumerate() {
        let color = COLORS[i % COLORS.len()];
        chart.draw_series(LineSeries::new(train, color.mix(0.45).stroke_width(1)))?;
        let validation: Vec<(f64, f64)> = validation
            .into_iter()
            .map(|(step, loss)| (step as f64, loss))
            .collect();
        chart
            .draw_series(LineSeries::new(validation.clone(), color.stroke_width(2)))?
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 24, y)], color.stroke_width(2)));
        chart.draw_series(
            validation
                .into_iter()
                .map(|point| Circle::new(point, 3, color.filled())),
        )?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperRight)
        .label_font(("sans-serif", 16))
        .background_style(WHITE.mix(0.9))
        .border_style(BLACK.mix(0.3))
        .draw()?;
    root.present()?;
    Ok(())
}

/// Means of consecutive steps.
fn smooth(curve: &[(u64, f64)]) -> Vec<(f64, f64)> {
    curve
        .chunks(SMOOTHING)
        .map(|chunk| {
            let n = chunk.len() as f64;
            let mean = |f: &dyn Fn(&(u64, f64)) -> f64| chunk.iter().map(f).sum::<f64>() / n;
            (mean(&|p| p.0 as f64), mean(&|p| p.1))
        })
        .collect()
}
