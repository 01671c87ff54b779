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
        let (low, high) = ((values.len() - 1) / 2, values.len() / 2);
        Ok(Self {
            median: (values[low] + values[high]) / 2.,
            min: values[0],
            max: values[values.len() - 1],
        })
    }
}
