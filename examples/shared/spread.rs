//! A summary of repeated measurements.

use anyhow::{Result, ensure};

/// Median and extremes of some times.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

impl Spread {
    pub fn of(mut values: Vec<f64>) -> Result<Self> {
        ensure!(!values.is_empty(), "no times to take a median of");
        values.sort_by(f64::total_cmp);
        Ok(Self {
            min: values[0],
            max: values[values.len() - 1],
            median: median(values),
        })
    }
}

/// The middle value, or the mean of the two in the middle; NaN without values.
pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => f64::NAN,
        len => (values[(len - 1) / 2] + values[len / 2]) / 2.,
    }
}
