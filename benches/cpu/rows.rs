//! Rows of results, as a table and as JSON.

use serde::{Deserialize, Serialize};

/// The figure by which a row is judged; higher is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Time of candle's f32 over ours.
    RatioF32,
    /// Time of the same with operands of bf16 over ours.
    RatioBf16,
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
    /// Tokens per second of requests that are served together over those of one.
    ServedRatio,
    /// Bytes that torch's bf16 autocast keeps for the backward pass over ours.
    KeptRatio,
    /// Bytes of each token kept for the backward pass; less is better, and there is no bar.
    BytesPerToken,
}

impl Metric {
    fn name(self) -> &'static str {
        match self {
            Self::RatioF32 => "ratio_f32",
            Self::RatioBf16 => "ratio_bf16",
            Self::GbPerS => "gb_per_s",
            Self::GelemPerS => "gelem_per_s",
            Self::TokensRatio => "tokens_ratio",
            Self::TokensRatioQ80 => "tokens_ratio_q8_0",
            Self::StepRatio => "step_ratio",
            Self::StepRatioDelayed => "step_delayed",
            Self::TokensPerS => "tokens_per_s",
            Self::ServedRatio => "served_ratio",
            Self::KeptRatio => "kept_ratio",
            Self::BytesPerToken => "bytes/token",
        }
    }
}

/// The smallest figures that a row must reach; higher is better.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Bars {
    /// Of the metric.
    #[serde(rename = "bar")]
    pub value: Option<f64>,
    /// Of the fraction of the machine's peak.
    #[serde(rename = "peak_bar")]
    pub peak: Option<f64>,
    /// Of the time of Q8_0 over ours.
    #[serde(rename = "q8_0_bar")]
    pub q8_0: Option<f64>,
}

impl From<Option<f64>> for Bars {
    fn from(value: Option<f64>) -> Self {
        Self {
            value,
            ..Self::default()
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
    #[serde(flatten)]
    pub bars: Bars,
    pub ours_ms: Option<f64>,
    pub candle_f32_ms: Option<f64>,
    pub candle_bf16_ms: Option<f64>,
    pub q8_0_ms: Option<f64>,
    pub peak_fraction: Option<f64>,
}

impl Row {
    /// The row's figures and their bars, where there are both.
    fn judged(&self) -> impl Iterator<Item = (f64, f64)> {
        let q8_0 = self.q8_0_ms.zip(self.ours_ms);
        let figures = [
            (Some(self.value), self.bars.value),
            (self.peak_fraction, self.bars.peak),
            (q8_0.map(|(q8_0, ours)| q8_0 / ours), self.bars.q8_0),
        ];
        figures.into_iter().filter_map(|(got, bar)| got.zip(bar))
    }

    /// Whether the row has any bars.
    pub fn has_bar(&self) -> bool {
        self.judged().next().is_some()
    }

    /// Whether the row misses one of its bars.
    pub fn misses(&self) -> bool {
        self.judged().any(|(got, bar)| got < bar)
    }

    /// Its bars in a few letters, for the table.
    fn asked(&self) -> String {
        let Bars { value, peak, q8_0 } = self.bars;
        let value = value.map(|bar| format!("{bar:.2}"));
        let peak = peak.map(|bar| format!("{:.0}%", bar * 100.));
        let q8_0 = q8_0.map(|bar| format!("{bar:.1}q"));
        let asked: Vec<String> = [value, peak, q8_0].into_iter().flatten().collect();
        match asked.is_empty() {
            true => "-".to_string(),
            false => asked.join(" "),
        }
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
        "{:<CASE$} {:>3} {:<12} {:>8} {:>9}      {:>10} {:>10} {:>10} {:>10} {:>6}",
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
        "{:<CASE$} {:>3} {:<12} {:>8.3} {:>9} {:<4} {:>10} {:>10} {:>10} {:>10} {:>6}",
        row.case,
        row.threads,
        row.metric.name(),
        row.value,
        row.asked(),
        if row.misses() { "MISS" } else { "" },
        ms(row.ours_ms),
        ms(row.candle_f32_ms),
        ms(row.candle_bf16_ms),
        ms(row.q8_0_ms),
        row.peak_fraction
            .map_or("-".to_string(), |part| format!("{:.0}%", part * 100.)),
    );
}
