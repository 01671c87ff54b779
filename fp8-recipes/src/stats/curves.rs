//! Recorded statistics over the steps, and drawings of them.

use crate::error::{Error, Result};
use crate::read::read_text;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

/// The largest file of statistics that is read: some million rows.
const FILE_LIMIT: u64 = 1 << 30;

/// What a drawing shows over the steps.
///
/// ```
/// use fp8_recipes::{StatsCurves, StatsQuantity};
/// let curves = StatsCurves::default();
/// let files = StatsQuantity::ALL.map(|quantity| (format!("{}.svg", quantity.name()), curves.to_svg(quantity)));
/// assert_eq!(files[4].0, "sqnr.svg");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StatsQuantity {
    /// Largest magnitude, in powers of ten.
    Amax,
    /// Largest quant_scale, in powers of ten.
    QuantScale,
    /// Share of the elements beyond the format's range, in percent.
    Overflow,
    /// Share of the elements that became 0, in percent.
    Underflow,
    /// Signal to quantization noise, in dB.
    Sqnr,
}

impl StatsQuantity {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Amax,
        Self::QuantScale,
        Self::Overflow,
        Self::Underflow,
        Self::Sqnr,
    ];

    /// As it stands over a drawing and, without the unit, in a file name: `amax`, `quant_scale`, `overflow`, `underflow`, `sqnr`.
    ///
    /// ```
    /// use fp8_recipes::StatsQuantity;
    /// assert_eq!(StatsQuantity::ALL.map(StatsQuantity::name)[1], "quant_scale");
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            Self::Amax => "amax",
            Self::QuantScale => "quant_scale",
            Self::Overflow => "overflow",
            Self::Underflow => "underflow",
            Self::Sqnr => "sqnr",
        }
    }

    fn key(self) -> &'static str {
        match self {
            Self::Amax => "amax",
            Self::QuantScale => "quant_scale_max",
            Self::Overflow => "saturated_share",
            Self::Underflow => "underflowed_share",
            Self::Sqnr => "sqnr_db",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Amax | Self::QuantScale => "powers of ten",
            Self::Overflow | Self::Underflow => "%",
            Self::Sqnr => "dB",
        }
    }

    /// The height at which a value is drawn; None where it has none, as the logarithm of 0.
    fn height(self, value: f64) -> Option<f64> {
        let height = match self {
            Self::Amax | Self::QuantScale => value.log10(),
            Self::Overflow | Self::Underflow => 100. * value,
            Self::Sqnr => value,
        };
        height.is_finite().then_some(height)
    }
}

/// What a [`StatsLog`](super::StatsLog) has written: for each layer and operand its rows over the steps.
///
/// ```
/// use fp8_recipes::{StatsCurves, StatsQuantity};
/// let lines = r#"{"step": 0, "layer": "fc", "operand": "input", "amax": 3.5}
/// {"step": 10, "layer": "fc", "operand": "input", "amax": 4.5}"#;
/// let curves = StatsCurves::from_json_lines(lines);
/// let (name, points) = &curves.of(StatsQuantity::Amax)[0];
/// assert_eq!((name.as_str(), points.as_slice()), ("fc.input", [(0, 3.5), (10, 4.5)].as_slice()));
/// assert!(curves.to_svg(StatsQuantity::Amax).starts_with("<svg"));
/// ```
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StatsCurves(BTreeMap<(String, String), BTreeMap<u64, Value>>);

impl StatsCurves {
    /// Reads the lines of a file. Where a step was recorded twice, as after a resume, the later line counts.
    ///
    /// # Errors
    /// If there is no regular file of at most 1 GiB of UTF-8. Lines that are no rows, as one that was cut off, are left out.
    ///
    /// ```
    /// # use fp8_recipes::{StatsCurves, StatsQuantity};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let lines = r#"{"step": 10, "layer": "fc", "operand": "input", "sqnr_db": 31.5}
    /// # {"step": 0, "layer": "fc", "operand": "weight", "amax": 2.0}"#;
    /// # let directory = tempfile::tempdir()?;
    /// let path = directory.path().join("stats.jsonl");
    /// std::fs::write(&path, lines)?;
    /// assert_eq!(StatsCurves::from_file(&path)?, StatsCurves::from_json_lines(lines));
    /// assert!(StatsCurves::from_file(directory.path()).is_err());
    /// # Ok(()) }
    /// ```
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = read_text(path, FILE_LIMIT)?;
        let curves = Self::from_json_lines(&text);
        if curves.0.is_empty() && !text.trim().is_empty() {
            return Err(Error::Read {
                path: path.to_path_buf(),
                source: std::io::Error::other("no line of it is a row of statistics"),
            });
        }
        Ok(curves)
    }

    /// Reads lines. Those that are no rows are left out.
    ///
    /// ```
    /// # use fp8_recipes::{StatsCurves, StatsQuantity};
    /// let row = r#"{"step": 3, "layer": "fc", "operand": "input", "amax": 1.5}"#;
    /// let curves = StatsCurves::from_json_lines(&format!("{row}\n{}", &row[..20]));
    /// assert_eq!(curves.steps(), [3]);
    /// ```
    pub fn from_json_lines(lines: &str) -> Self {
        let mut curves: BTreeMap<_, BTreeMap<u64, Value>> = BTreeMap::new();
        for line in lines.lines() {
            let Ok(row) = serde_json::from_str::<Value>(line) else {
                continue;
            };
            let text = |key: &str| row[key].as_str().map(str::to_string);
            let key = (text("layer"), text("operand"), row["step"].as_u64());
            if let (Some(layer), Some(operand), Some(step)) = key {
                curves
                    .entry((layer, operand))
                    .or_default()
                    .insert(step, row);
            }
        }
        Self(curves)
    }

    /// The steps that were recorded, in order.
    ///
    /// ```
    /// # use fp8_recipes::{StatsCurves, StatsQuantity};
    /// # let lines = r#"{"step": 10, "layer": "fc", "operand": "input", "sqnr_db": 31.5}
    /// # {"step": 0, "layer": "fc", "operand": "weight", "amax": 2.0}"#;
    /// assert_eq!(StatsCurves::from_json_lines(lines).steps(), [0, 10]);
    /// ```
    pub fn steps(&self) -> Vec<u64> {
        let steps = self.0.values().flat_map(|rows| rows.keys().copied());
        steps.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// A curve for each `layer.operand`: steps and values, where there are any.
    ///
    /// ```
    /// # use fp8_recipes::{StatsCurves, StatsQuantity};
    /// # let lines = r#"{"step": 10, "layer": "fc", "operand": "input", "sqnr_db": 31.5}
    /// # {"step": 0, "layer": "fc", "operand": "weight", "amax": 2.0}"#;
    /// let curves = StatsCurves::from_json_lines(lines);
    /// assert_eq!(curves.of(StatsQuantity::Sqnr), [("fc.input".to_string(), vec![(10, 31.5)])]);
    /// assert!(curves.of(StatsQuantity::Underflow).is_empty());
    /// ```
    pub fn of(&self, quantity: StatsQuantity) -> Vec<(String, Vec<(u64, f64)>)> {
        let curve = |((layer, operand), rows): (&(String, String), &BTreeMap<u64, Value>)| {
            let value = |(&step, row): (&u64, &Value)| Some((step, row[quantity.key()].as_f64()?));
            let points: Vec<_> = rows.iter().filter_map(value).collect();
            (!points.is_empty()).then(|| (crate::nn::join(layer, operand), points))
        };
        self.0.iter().filter_map(curve).collect()
    }

    /// A drawing of how `quantity` moves, a line for each layer and operand. A browser names a line under the pointer; the
    /// first sixteen are named beside it.
    ///
    /// ```
    /// # use fp8_recipes::{StatsCurves, StatsQuantity};
    /// # let lines = r#"{"step": 10, "layer": "fc", "operand": "input", "sqnr_db": 31.5}
    /// # {"step": 0, "layer": "fc", "operand": "weight", "amax": 2.0}"#;
    /// let svg = StatsCurves::from_json_lines(lines).to_svg(StatsQuantity::Amax);
    /// assert!(svg.contains("<title>fc.weight</title>") && !svg.contains("fc.input"));
    /// ```
    pub fn to_svg(&self, quantity: StatsQuantity) -> String {
        let mut svg = String::new();
        // Writing to a String cannot fail.
        let _ = draw(&mut svg, quantity, &self.of(quantity));
        svg
    }
}

const COLORS: [&str; 8] = [
    "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f",
];
/// Of the drawing.
const SIZE: (f64, f64) = (960., 480.);
/// Where the lines are drawn: left, top, right, bottom.
const FRAME: (f64, f64, f64, f64) = (70., 40., 680., 440.);
/// Lines that are named beside the drawing.
const NAMED: usize = 16;

fn draw(
    svg: &mut String,
    quantity: StatsQuantity,
    curves: &[(String, Vec<(u64, f64)>)],
) -> std::fmt::Result {
    let (width, height) = SIZE;
    let (left, top, right, bottom) = FRAME;
    let heights = |points: &[(u64, f64)]| -> Vec<(f64, f64)> {
        let at = |&(step, value): &(u64, f64)| Some((step as f64, quantity.height(value)?));
        points.iter().filter_map(at).collect()
    };
    let lines: Vec<_> = curves
        .iter()
        .map(|(name, points)| (name, heights(points)))
        .collect();
    let all = || lines.iter().flat_map(|(_, points)| points);
    let (first, last) = bounds(all().map(|point| point.0));
    let (low, high) = bounds(all().map(|point| point.1));
    let x = |step: f64| left + (step - first) / (last - first) * (right - left);
    let y = |value: f64| bottom - (value - low) / (high - low) * (bottom - top);

    writeln!(
        svg,
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="12">
<rect width="100%" height="100%" fill="white"/>
<text x="{left}" y="24" font-size="16">{} ({})</text>
<text x="{right}" y="{:.0}" text-anchor="end">step</text>"##,
        quantity.name(),
        quantity.unit(),
        bottom + 34.,
    )?;
    for i in 0..=4 {
        let part = f64::from(i) / 4.;
        let (step, value) = (first + part * (last - first), low + part * (high - low));
        let (at_x, at_y) = (x(step), y(value));
        writeln!(
            svg,
            r##"<path d="M{left} {at_y:.1}H{right}M{at_x:.1} {top}V{bottom}" stroke="#dddddd"/>
<text x="{:.0}" y="{:.1}" text-anchor="end">{}</text>
<text x="{at_x:.1}" y="{:.0}" text-anchor="middle">{}</text>"##,
            left - 6.,
            at_y + 4.,
            tick(value),
            bottom + 18.,
            tick(step),
        )?;
    }
    for (i, (name, points)) in lines.iter().enumerate() {
        let (color, name) = (COLORS[i % COLORS.len()], escaped(name));
        let at: Vec<_> = points
            .iter()
            .map(|&(step, value)| format!("{:.1},{:.1}", x(step), y(value)))
            .collect();
        writeln!(
            svg,
            r##"<polyline points="{}" fill="none" stroke="{color}" stroke-width="1.5"><title>{name}</title></polyline>"##,
            at.join(" ")
        )?;
        if i < NAMED {
            let at = top + 20. * i as f64;
            let (from, to) = (right + 12., right + 32.);
            writeln!(
                svg,
                r##"<path d="M{from} {at}H{to}" stroke="{color}" stroke-width="2"/><text x="{:.0}" y="{:.0}">{name}</text>"##,
                to + 6.,
                at + 4.,
            )?;
        }
    }
    if lines.len() > NAMED {
        let at = top + 20. * NAMED as f64 + 4.;
        let more = lines.len() - NAMED;
        writeln!(
            svg,
            r##"<text x="{}" y="{at}">and {more} more</text>"##,
            right + 38.
        )?;
    }
    svg.push_str("</svg>\n");
    Ok(())
}

/// The least and the largest, apart from each other.
fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let span = |(low, high): (f64, f64), value: f64| (low.min(value), high.max(value));
    let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), span);
    match () {
        _ if low > high => (0., 1.),
        _ if low == high => (low - 0.5, high + 0.5),
        _ => (low, high),
    }
}

/// Three digits are enough at a line.
fn tick(value: f64) -> String {
    match value.abs() {
        large if large >= 100. => format!("{value:.0}"),
        middle if middle >= 1. || middle == 0. => format!("{value:.1}"),
        _ => format!("{value:.3}"),
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
