//! What was measured, as a table and as JSON.

use fp8_core::{Format, Granularity};
use serde::Serialize;
use std::fmt;

/// The casts of one operand of one layer since the statistics were last taken.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StatsRow {
    /// Path of the layer.
    pub layer: String,
    /// The operand: `input`, `input_for_grad_weight`, `weight`, ... A copy that serves both GEMMs of an operand counts for the first.
    pub operand: &'static str,
    /// Format of the last cast.
    pub format: Format,
    /// Which elements shared a scale in the last cast.
    pub granularity: Granularity,
    /// Number of casts; a cached weight counts once.
    pub casts: u64,
    /// Elements of all casts.
    pub elements: u64,
    /// Largest finite magnitude.
    pub amax: f32,
    /// Smallest scale that multiplied values before the cast.
    pub quant_scale_min: f32,
    /// Largest scale that multiplied values before the cast.
    pub quant_scale_max: f32,
    /// Elements that were beyond the format's range after scaling and rounding, and became its maximum, or Inf or NaN if the recipe
    /// does not saturate.
    pub saturated: u64,
    /// Their share of all elements.
    pub saturated_share: f64,
    /// Nonzero elements that became 0.
    pub underflowed: u64,
    /// Their share of all elements.
    pub underflowed_share: f64,
    /// Elements that were Inf or NaN or became so; they are not part of the signal to noise.
    pub non_finite: u64,
    /// Signal to quantization noise, `10 log10(sum x^2 / sum (x - dequantized)^2)`; None where either sum is 0.
    pub sqnr_db: Option<f64>,
}

/// The measurements of [`CastStats`](super::CastStats). Prints as a table; programs use [`StatsReport::to_json`].
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StatsReport {
    /// A row for each layer and operand that was cast, sorted by layer.
    pub rows: Vec<StatsRow>,
}

impl StatsReport {
    /// The rows as a JSON list of objects.
    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!(self.rows)
    }
}

impl fmt::Display for StatsReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.rows.iter().map(|row| row.layer.len()).max();
        let width = width.unwrap_or(0).max("layer".len());
        write!(
            f,
            "{:width$}  {:27}  {:10}  {:>9}  {:>21}  {:>9}  {:>9}  {:>7}",
            "layer", "operand", "format", "amax", "quant_scale", "saturated", "underflow", "SQNR"
        )?;
        for row in &self.rows {
            let scales = match row.quant_scale_min == row.quant_scale_max {
                true => format!("{:.3e}", row.quant_scale_max),
                false => format!("{:.2e}..{:.2e}", row.quant_scale_min, row.quant_scale_max),
            };
            let sqnr = row
                .sqnr_db
                .map_or("-".to_string(), |db| format!("{db:.1} dB"));
            write!(
                f,
                "\n{:width$}  {:27}  {:10}  {:>9.2e}  {scales:>21}  {:>8.3}%  {:>8.3}%  {sqnr:>7}",
                row.layer,
                row.operand,
                row.format.to_string(),
                row.amax,
                100. * row.saturated_share,
                100. * row.underflowed_share,
            )?;
            if row.non_finite > 0 {
                write!(f, "  {} Inf or NaN", row.non_finite)?;
            }
        }
        Ok(())
    }
}
