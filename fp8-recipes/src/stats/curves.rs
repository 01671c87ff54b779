//! Recorded statistics over the steps, and drawings of them.

use super::drawing::{self, Line, Panel};
use crate::FilesError;
use crate::config::Operand;
use crate::error::Result;
use crate::read::read_text;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The largest file of statistics that is read: some million rows.
const FILE_LIMIT: u64 = 1 << 30;

/// What a drawing shows over the steps.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{StatsCurves, StatsQuantity};
/// let curves = StatsCurves::default();
/// let files = StatsQuantity::ALL.map(|quantity| (format!("{}.svg", quantity.name()), curves.to_svg(quantity)));
/// assert_eq!(files[4].0, "sqnr.svg");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StatsQuantity {
    /// Largest magnitude.
    Amax,
    /// Largest quant_scale.
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

    /// Of the values beside a drawing; none for those of powers of ten.
    pub(super) fn unit(self) -> &'static str {
        match self {
            Self::Amax | Self::QuantScale => "",
            Self::Overflow | Self::Underflow => "%",
            Self::Sqnr => "dB",
        }
    }

    /// Whether equal distances are equal ratios.
    pub(super) fn is_logarithmic(self) -> bool {
        matches!(self, Self::Amax | Self::QuantScale)
    }

    /// Where every drawing begins.
    pub(super) fn least(self) -> Option<f64> {
        matches!(self, Self::Overflow | Self::Underflow).then_some(0.)
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

    /// What makes a line one of the worst, for people.
    pub(super) fn worst_is(self) -> &'static str {
        match self {
            Self::Amax | Self::QuantScale => "named: those that move most (largest / least)",
            Self::Overflow | Self::Underflow => "named: the largest",
            Self::Sqnr => "named: the lowest",
        }
    }

    /// How bad a line of these points is: the larger, the worse.
    pub(super) fn badness(self, points: &[(f64, f64)]) -> f64 {
        let heights = || points.iter().map(|point| point.1);
        let largest = || heights().fold(f64::NEG_INFINITY, f64::max);
        let least = || heights().fold(f64::INFINITY, f64::min);
        match self {
            Self::Amax | Self::QuantScale => largest() - least(),
            Self::Overflow | Self::Underflow => largest(),
            Self::Sqnr => -least(),
        }
    }

    /// The value that `badness` stands for.
    pub(super) fn worst_value(self, badness: f64) -> String {
        match self {
            Self::Amax | Self::QuantScale => format!("\u{d7}{}", three_digits(10f64.powf(badness))),
            Self::Overflow | Self::Underflow => format!("{} %", three_digits(badness)),
            Self::Sqnr => format!("{badness:.1} dB", badness = -badness),
        }
    }
}

/// Short, for people.
fn three_digits(value: f64) -> String {
    match value {
        0. => "0".to_string(),
        10.0..10_000.0 => format!("{value:.0}"),
        1.0..10.0 => format!("{value:.1}"),
        0.01..1.0 => format!("{value:.2}"),
        _ => format!("{value:.0e}"),
    }
}

/// What a [`StatsLog`](super::StatsLog) has written: for each layer and operand its rows over the steps.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{StatsCurves, StatsQuantity};
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
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let text = read_text(path, FILE_LIMIT)?;
        let curves = Self::from_json_lines(&text);
        if curves.0.is_empty() && !text.trim().is_empty() {
            return Err(FilesError::Read {
                path: path.to_path_buf(),
                source: std::io::Error::other("no line of it is a row of statistics"),
            }
            .into());
        }
        Ok(curves)
    }

    /// Reads lines. Those that are no rows are left out.
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
    pub fn steps(&self) -> Vec<u64> {
        let steps = self.0.values().flat_map(|rows| rows.keys().copied());
        steps.collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// A curve for each `layer.operand`: steps and values, where there are any.
    pub fn of(&self, quantity: StatsQuantity) -> Vec<(String, Vec<(u64, f64)>)> {
        let curve = |((layer, operand), rows): (&(String, String), &BTreeMap<u64, Value>)| {
            let value = |(&step, row): (&u64, &Value)| Some((step, row[quantity.key()].as_f64()?));
            let points: Vec<_> = rows.iter().filter_map(value).collect();
            (!points.is_empty()).then(|| (fp8_files::names::join(layer, operand), points))
        };
        self.0.iter().filter_map(curve).collect()
    }

    /// A drawing of how `quantity` moves: below each other a panel for each operand, in it a line for each layer. The five
    /// worst are in color and named beside it: those of the lowest signal to noise, of the largest shares, and amaxes and scales
    /// that move most. All others are gray; a browser names a line under the pointer.
    pub fn to_svg(&self, quantity: StatsQuantity) -> String {
        let mut panels: Vec<Panel> = vec![];
        for ((layer, operand), rows) in &self.0 {
            let height = |(&step, row): (&u64, &Value)| {
                let value = row[quantity.key()].as_f64()?;
                Some((step as f64, quantity.height(value)?))
            };
            let points: Vec<_> = rows.iter().filter_map(height).collect();
            if points.is_empty() {
                continue;
            }
            let line = Line {
                layer: layer.clone(),
                name: fp8_files::names::join(layer, operand),
                points,
            };
            match panels.iter_mut().find(|panel| panel.operand == *operand) {
                Some(panel) => panel.lines.push(line),
                None => panels.push(Panel {
                    operand: operand.clone(),
                    lines: vec![line],
                }),
            }
        }
        let operands = || Operand::OF_GEMMS.into_iter().chain(Operand::RESULTS);
        panels.sort_by_key(|panel| {
            let known = operands().position(|operand| operand.name() == panel.operand);
            (known.unwrap_or(usize::MAX), panel.operand.clone())
        });
        drawing::to_svg(quantity, &panels)
    }
}
