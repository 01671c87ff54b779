//! Drawings of recorded statistics: a panel for each operand, its worst layers in color and by name.

use super::quantity::StatsQuantity;
use std::fmt::Write;

/// A layer and its points: step and height.
pub(super) struct Line {
    pub layer: String,
    /// Layer and operand.
    pub name: String,
    pub points: Vec<(f64, f64)>,
}

/// The lines of one operand.
pub(super) struct Panel {
    pub operand: String,
    pub lines: Vec<Line>,
}

/// Colors of the named lines, the worst first. Color-blind readers can tell them apart.
const COLORS: [&str; 5] = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#000000"];
const WIDTH: f64 = 1040.;
/// Characters of a path beside a panel.
const NAME: usize = 30;
/// Left and right edge of the panels.
const LEFT: f64 = 80.;
const RIGHT: f64 = 690.;
/// Height above the first panel, of a panel, and between two panels.
const TOP: f64 = 76.;
const PANEL: f64 = 180.;
const GAP: f64 = 64.;

/// An axis: its ends, and the values that have a line and a label.
struct Axis {
    low: f64,
    high: f64,
    ticks: Vec<(f64, String)>,
}

impl Axis {
    /// The position of `value` between the low end (0) and the high end (1).
    fn part(&self, value: f64) -> f64 {
        (value - self.low) / (self.high - self.low)
    }
}

pub(super) fn to_svg(quantity: StatsQuantity, panels: &[Panel]) -> String {
    let mut svg = String::new();
    // Writing to a String cannot fail.
    let _ = draw(&mut svg, quantity, panels);
    svg
}

fn draw(svg: &mut String, quantity: StatsQuantity, panels: &[Panel]) -> std::fmt::Result {
    let height = TOP + (PANEL + GAP) * panels.len().max(1) as f64;
    let unit = match quantity.unit() {
        "" => String::new(),
        unit => format!(" ({unit})"),
    };
    let note = match panels {
        [] => "nothing was recorded",
        _ => quantity.worst_is(),
    };
    writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="14">
<rect width="100%" height="100%" fill="white"/>
<text x="{LEFT}" y="28" font-size="18">{}{unit}</text>
<text x="{RIGHT}" y="28" text-anchor="end" fill="#555555">{note}</text>"##,
        quantity.name(),
    )?;
    let steps = panels.iter().flat_map(|panel| &panel.lines);
    let steps = span(steps.flat_map(|line| line.points.iter().map(|point| point.0)));
    let (first, last) = steps.unwrap_or((0., 1.));
    let x = Axis {
        low: first,
        high: if last > first { last } else { first + 1. },
        ticks: (multiples(first, last, round_step((last - first) / 6.).max(1.)))
            .map(|step| (step, format!("{step}")))
            .collect(),
    };
    for (i, panel) in panels.iter().enumerate() {
        draw_panel(svg, quantity, panel, &x, TOP + (PANEL + GAP) * i as f64)?;
    }
    svg.push_str("</svg>\n");
    Ok(())
}

fn draw_panel(
    svg: &mut String,
    quantity: StatsQuantity,
    panel: &Panel,
    x: &Axis,
    top: f64,
) -> std::fmt::Result {
    let bottom = top + PANEL;
    let heights = panel.lines.iter().flat_map(|line| &line.points);
    let heights = span(heights.map(|point| point.1)).unwrap_or((0., 0.));
    let y = match quantity.is_logarithmic() {
        true => decades(heights),
        false => linear(heights, quantity.least()),
    };
    let at = |(step, value): (f64, f64)| {
        let (right, up) = (x.part(step), y.part(value));
        (LEFT + right * (RIGHT - LEFT), bottom - up * PANEL)
    };
    writeln!(
        svg,
        r##"<text x="{LEFT}" y="{}" font-weight="bold">{}</text>"##,
        top - 10.,
        escaped(&panel.operand)
    )?;
    for (value, label) in &y.ticks {
        let at = at((x.low, *value)).1;
        writeln!(
            svg,
            r##"<path d="M{LEFT} {at:.1}H{RIGHT}" stroke="#e0e0e0"/><text x="{}" y="{:.1}" text-anchor="end">{label}</text>"##,
            LEFT - 8.,
            at + 5.,
        )?;
    }
    for (step, label) in &x.ticks {
        let at = at((*step, y.low)).0;
        writeln!(
            svg,
            r##"<path d="M{at:.1} {top}V{bottom}" stroke="#e0e0e0"/><text x="{at:.1}" y="{}" text-anchor="middle">{label}</text>"##,
            bottom + 20.,
        )?;
    }
    writeln!(
        svg,
        r##"<path d="M{LEFT} {top}V{bottom}H{RIGHT}" fill="none" stroke="#888888"/><text x="{}" y="{}">step</text>"##,
        RIGHT + 22.,
        bottom + 20.,
    )?;
    let mut lines: Vec<_> = (panel.lines.iter())
        .map(|line| (line, quantity.badness(&line.points)))
        .collect();
    lines.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let (named, others) = lines.split_at(lines.len().min(COLORS.len()));
    for (line, _) in others {
        draw_line(svg, line, "#cccccc", 1., at)?;
    }
    // The worst last, above all others.
    for ((line, _), color) in named.iter().zip(COLORS).rev() {
        draw_line(svg, line, color, 2., at)?;
    }
    let text_x = RIGHT + 44.;
    for (i, ((line, badness), color)) in named.iter().zip(COLORS).enumerate() {
        let at = top + 12. + 24. * i as f64;
        writeln!(
            svg,
            r##"<path d="M{} {at}H{}" stroke="{color}" stroke-width="3"/><text x="{text_x}" y="{}">{} <tspan fill="#555555">{}</tspan></text>"##,
            RIGHT + 14.,
            RIGHT + 36.,
            at + 5.,
            escaped(&shortened(&line.layer)),
            quantity.worst_value(*badness),
        )?;
    }
    if !others.is_empty() {
        let at = top + 12. + 24. * COLORS.len() as f64 + 5.;
        writeln!(
            svg,
            r##"<text x="{text_x}" y="{at}" fill="#555555">and {} more in gray</text>"##,
            others.len()
        )?;
    }
    Ok(())
}

fn draw_line(
    svg: &mut String,
    line: &Line,
    color: &str,
    width: f64,
    at: impl Fn((f64, f64)) -> (f64, f64),
) -> std::fmt::Result {
    let points: Vec<_> = (line.points.iter())
        .map(|&point| at(point))
        .map(|(x, y)| format!("{x:.1},{y:.1}"))
        .collect();
    // A single point becomes a line of length 0, which round ends show as a dot.
    let points = match points.as_slice() {
        [point] => format!("{point} {point}"),
        points => points.join(" "),
    };
    writeln!(
        svg,
        r##"<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{width}" stroke-linecap="round" stroke-linejoin="round"><title>{}</title></polyline>"##,
        escaped(&line.name)
    )
}

/// The smallest and the largest value.
fn span(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |span, value| match span {
        None => Some((value, value)),
        Some((low, high)) => Some((low.min(value), high.max(value))),
    })
}

/// The smallest of 1, 2, 5, 10, 20, .. and their tenths that is at least `step`.
fn round_step(step: f64) -> f64 {
    if step <= 0. {
        return 1.;
    }
    let decade = 10f64.powf(step.log10().floor());
    let digit = [1., 2., 5.]
        .into_iter()
        .find(|digit| digit * decade >= step);
    digit.unwrap_or(10.) * decade
}

/// The multiples of `step` from `low` to `high`, inclusive.
fn multiples(low: f64, high: f64, step: f64) -> impl Iterator<Item = f64> {
    // An end that is a multiple but for rounding counts as one.
    let (from, to) = ((low / step - 1e-9).ceil(), (high / step + 1e-9).floor());
    (0..=(to - from).max(0.) as u64).map(move |i| (from + i as f64) * step)
}

/// A linear axis between two round values.
fn linear((low, high): (f64, f64), least: Option<f64>) -> Axis {
    let low = least.unwrap_or(low).min(low);
    let high = if high > low { high } else { low + 1. };
    let step = round_step((high - low) / 4.);
    let (low, high) = (
        (low / step + 1e-9).floor() * step,
        (high / step - 1e-9).ceil() * step,
    );
    let digits = (-step.log10().floor()).max(0.) as usize;
    let ticks = multiples(low, high, step).map(|value| (value, format!("{value:.digits$}")));
    Axis {
        low,
        high,
        ticks: ticks.collect(),
    }
}

/// An axis of base-10 logarithms, with labels at powers of ten, or at 1, 2, 5, 10 if it spans few powers.
fn decades((low, high): (f64, f64)) -> Axis {
    let (first, last) = (low.floor() as i32, high.ceil() as i32);
    if high - low > 2. {
        let step = round_step(f64::from(last - first) / 5.).max(1.);
        let (low, high) = (
            (low / step).floor() * step,
            (high / step - 1e-9).ceil() * step,
        );
        let ticks = multiples(low, high, step).map(|value| (value, decimal(1, value as i32)));
        return Axis {
            low,
            high,
            ticks: ticks.collect(),
        };
    }
    let ticks = (first - 1..=last).flat_map(|exponent| [1, 2, 5].map(|digit| (digit, exponent)));
    let ticks: Vec<_> = ticks
        .map(|(digit, exponent)| {
            let height = f64::from(exponent) + f64::from(digit).log10();
            (height, decimal(digit, exponent))
        })
        .collect();
    // From the last tick at or below all values to the first one at or above them, at least two ticks.
    let below = ticks.iter().rposition(|tick| tick.0 <= low + 1e-9);
    let above = ticks.iter().position(|tick| tick.0 >= high - 1e-9);
    let (below, above) = (below.unwrap_or(0), above.unwrap_or(ticks.len() - 1));
    let (below, above) = match below < above {
        true => (below, above),
        false => (below.saturating_sub(1), (above + 1).min(ticks.len() - 1)),
    };
    Axis {
        low: ticks[below].0,
        high: ticks[above].0,
        ticks: ticks[below..=above].to_vec(),
    }
}

/// A short text of `digit` times a power of ten.
fn decimal(digit: u32, exponent: i32) -> String {
    match exponent {
        0..=4 => format!("{digit}{}", "0".repeat(exponent as usize)),
        -3..=-1 => format!("0.{}{digit}", "0".repeat((-1 - exponent) as usize)),
        _ => format!("{digit}e{exponent}"),
    }
}

/// The end of a long path, which distinguishes layers.
fn shortened(path: &str) -> String {
    match path.chars().count().checked_sub(NAME) {
        None | Some(0) if path.is_empty() => "(root)".to_string(),
        None | Some(0) => path.to_string(),
        Some(more) => {
            let end: String = path.chars().skip(more + 1).collect();
            format!("\u{2026}{end}")
        }
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
