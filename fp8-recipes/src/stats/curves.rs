//! Recorded statistics over the steps.

use super::drawing::{self, Line, Panel};
use super::quantity::StatsQuantity;
use crate::FilesError;
use crate::config::Operand;
use crate::error::Result;
use crate::read::read_text;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

/// The largest file of statistics that is read: some million rows.
const FILE_LIMIT: u64 = 1 << 30;

/// The contents of a [`StatsLog`](super::StatsLog): for each layer and operand its rows over the steps.
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
    /// If there is no regular file of at most 1 GiB of UTF-8. Lines that are not rows, such as a truncated last line, are
    /// skipped.
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

    /// Reads lines. Skips those that are not rows.
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

    /// Draws `quantity` over the steps: one panel per operand, one line per layer. The five worst lines are colored and named: those
    /// with the lowest signal to noise, the largest shares, or the amaxes and scales that change most. The others are gray; a browser
    /// shows the name of the line under the pointer.
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
