//! Rows of results, as a table and as JSON.

use serde::Serialize;

/// The figure that a row is judged by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Metric {
    /// Time of candle's bf16 over ours.
    RatioBf16,
    /// Time of candle's own form of the same over ours.
    RatioCandle,
    /// Part of the bandwidth of a copy on the device.
    CopyShare,
    /// Part of the chip's peak of dense bf16 products.
    PeakShare,
    /// 10^9 bytes read and written per second.
    GbPerS,
    /// Milliseconds; the only metric where less is better.
    Ms,
}

impl Metric {
    fn name(self) -> &'static str {
        match self {
            Self::RatioBf16 => "ratio_bf16",
            Self::RatioCandle => "ratio_candle",
            Self::CopyShare => "copy_share",
            Self::PeakShare => "peak_share",
            Self::GbPerS => "gb_per_s",
            Self::Ms => "ms",
        }
    }
}

/// One case.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub case: String,
    pub metric: Metric,
    pub value: f64,
    pub bar: Option<f64>,
    pub ours_ms: f64,
    /// The other time, if `value` is a ratio.
    pub against_ms: Option<f64>,
    pub tflop_per_s: Option<f64>,
    pub gb_per_s: Option<f64>,
}

impl Row {
    /// Whether the row reaches its bar; None without a bar. NaN does not.
    pub fn passes(&self) -> Option<bool> {
        self.bar.map(|bar| match self.metric {
            Metric::Ms => self.value <= bar,
            _ => self.value >= bar,
        })
    }
}

const CASE: usize = 60;

/// The names over the columns.
pub fn print_header() {
    println!(
        "{:<CASE$} {:<12} {:>9} {:>6} {:<4} {:>10} {:>10} {:>8} {:>7}",
        "case", "metric", "value", "bar", "", "ours ms", "against ms", "TFLOP/s", "GB/s"
    );
}

/// One line of the table.
pub fn print_row(row: &Row) {
    let text = |value: Option<f64>, digits: usize| {
        value.map_or("-".to_string(), |value| format!("{value:.digits$}"))
    };
    let verdict = match row.passes() {
        None => "",
        Some(true) => "pass",
        Some(false) => "MISS",
    };
    println!(
        "{:<CASE$} {:<12} {:>9.3} {:>6} {verdict:<4} {:>10} {:>10} {:>8} {:>7}",
        row.case,
        row.metric.name(),
        row.value,
        text(row.bar, 2),
        text(Some(row.ours_ms), 4),
        text(row.against_ms, 4),
        text(row.tflop_per_s, 1),
        text(row.gb_per_s, 0),
    );
}
