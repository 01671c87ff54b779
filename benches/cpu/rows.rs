//! Rows of results, as a table and as JSON.

use serde::{Deserialize, Serialize};

/// The figure that a row is judged by; higher is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Time of candle's f32 over ours.
    RatioF32,
    /// 10^9 bytes of input per second.
    GbPerS,
    /// 10^9 elements per second.
    GelemPerS,
    /// Tokens per second over those of f32.
    TokensRatio,
    /// Tokens per second over those of Q8_0.
    TokensRatioQ80,
    /// Time of an f32 training step over ours.
    StepRatio,
    /// Time of a training step with the recipe `delayed` over ours.
    StepRatioDelayed,
    /// Tokens per second of a training step.
    TokensPerS,
    /// Bytes that torch's bf16 autocast keeps for the backward pass over ours.
    KeptRatio,
    /// Bytes of each token kept for the backward pass; less is better, and there is no bar.
    BytesPerToken,
}

impl Metric {
    fn name(self) -> &'static str {
        match self {
            Self::RatioF32 => "ratio_f32",
            Self::GbPerS => "gb_per_s",
            Self::GelemPerS => "gelem_per_s",
            Self::TokensRatio => "tokens_ratio",
            Self::TokensRatioQ80 => "tokens_ratio_q8_0",
            Self::StepRatio => "step_ratio",
            Self::StepRatioDelayed => "step_delayed",
            Self::TokensPerS => "tokens_per_s",
            Self::KeptRatio => "kept_ratio",
            Self::BytesPerToken => "bytes/token",
        }
    }
}

/// One case with one number of threads.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    pub case: String,
    pub threads: usize,
    pub metric: Metric,
    pub value: f64,
    pub bar: Option<f64>,
    pub ours_ms: Option<f64>,
    pub candle_f32_ms: Option<f64>,
    pub candle_bf16_ms: Option<f64>,
    pub q8_0_ms: Option<f64>,
    pub peak_fraction: Option<f64>,
}

impl Row {
    /// Whether the row misses its bar.
    pub fn misses(&self) -> bool {
        self.bar.is_some_and(|bar| self.value < bar)
    }
}

/// The work of a call, to be compared with a peak of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Work {
    /// Floating point operations.
    Flop(f64),
    /// Bytes that must come from memory.
    Read(f64),
}

/// A row from a child; the parent computes its fraction of the peak.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    pub row: Row,
    pub work: Option<Work>,
}

const CASE: usize = 58;

/// The names over the columns.
pub fn print_header() {
    println!(
        "{:<CASE$} {:>3} {:<12} {:>8} {:>6}      {:>10} {:>10} {:>10} {:>10} {:>6}",
        "case", "thr", "metric", "value", "bar", "ours ms", "f32 ms", "bf16 ms", "q8_0 ms", "peak"
    );
}

/// One line of the table.
pub fn print_row(row: &Row) {
    let text = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_string(), |value| format!("{value:.digits$}"))
    };
    let ms = |value: Option<f64>| text(value, if value < Some(10.) { 4 } else { 2 });
    println!(
        "{:<CASE$} {:>3} {:<12} {:>8.3} {:>6} {:<4} {:>10} {:>10} {:>10} {:>10} {:>6}",
        row.case,
        row.threads,
        row.metric.name(),
        row.value,
        text(row.bar, 2),
        if row.misses() { "MISS" } else { "" },
        ms(row.ours_ms),
        ms(row.candle_f32_ms),
        ms(row.candle_bf16_ms),
        ms(row.q8_0_ms),
        row.peak_fraction
            .map_or("-".to_string(), |part| format!("{:.0}%", part * 100.)),
    );
}
