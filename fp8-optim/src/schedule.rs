//! Learning rate as a function of the step.

use std::f64::consts::PI;

use serde::{Deserialize, Serialize};

#[cfg(doc)]
use super::error::OptimError;
use super::error::Result;
use super::settings::{check, check_not_negative};

/// A learning rate schedule: a pure function of the step, so a resumed run needs nothing but the step.
///
/// Steps count from 0. While `step < warmup_steps` the rate rises linearly, `peak * (step + 1) / warmup_steps`: the rate of the first step
/// is above 0, and step `warmup_steps - 1` runs at the peak.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum LrSchedule {
    /// A warm-up, then the same rate for ever.
    Constant {
        /// The rate.
        lr: f64,
        /// Steps of linear warm-up; 0 for none.
        #[serde(default)]
        warmup_steps: u64,
    },
    /// A warm-up, then half a cosine down to `peak_lr * min_ratio` at `total_steps`, where the rate stays.
    Cosine {
        /// The highest rate.
        peak_lr: f64,
        /// The last rate as a fraction of the highest, in [0, 1].
        #[serde(default = "default_min_ratio")]
        min_ratio: f64,
        /// Steps of linear warm-up; 0 for none.
        #[serde(default)]
        warmup_steps: u64,
        /// Number of steps, warm-up included. If it is not above `warmup_steps`, the rate falls to its minimum right after the warm-up.
        total_steps: u64,
    },
}

fn default_min_ratio() -> f64 {
    0.1
}

impl LrSchedule {
    /// A constant rate without warm-up.
    pub fn constant(lr: f64) -> Self {
        LrSchedule::Constant {
            lr,
            warmup_steps: 0,
        }
    }

    /// Warm-up, then a cosine down to a tenth of `peak_lr` at `total_steps`.
    pub fn cosine(peak_lr: f64, warmup_steps: u64, total_steps: u64) -> Self {
        LrSchedule::Cosine {
            peak_lr,
            min_ratio: default_min_ratio(),
            warmup_steps,
            total_steps,
        }
    }

    /// The same schedule with another minimum, as a fraction of its peak; a constant schedule has no minimum and stays as it is.
    pub fn with_min_ratio(mut self, ratio: f64) -> Self {
        if let LrSchedule::Cosine { min_ratio, .. } = &mut self {
            *min_ratio = ratio;
        }
        self
    }

    /// The rate of the step with this number, counted from 0. It is finite for every step of a valid schedule.
    pub fn lr(&self, step: u64) -> f64 {
        match *self {
            LrSchedule::Constant { lr, warmup_steps } => {
                warmup(lr, warmup_steps, step).unwrap_or(lr)
            }
            LrSchedule::Cosine {
                peak_lr,
                min_ratio,
                warmup_steps,
                total_steps,
            } => warmup(peak_lr, warmup_steps, step).unwrap_or_else(|| {
                let length = total_steps.saturating_sub(warmup_steps);
                let done = step - warmup_steps;
                if done >= length {
                    return peak_lr * min_ratio;
                }
                let cosine = 0.5 * (1.0 + (PI * done as f64 / length as f64).cos());
                peak_lr * (min_ratio + (1.0 - min_ratio) * cosine)
            }),
        }
    }

    /// Checks that rates are finite and not negative, and that the ratio is in [0, 1].
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`] with the name and value of the field at fault.
    pub fn validate(&self) -> Result<()> {
        match *self {
            LrSchedule::Constant { lr, .. } => check_not_negative("lr", lr),
            LrSchedule::Cosine {
                peak_lr, min_ratio, ..
            } => {
                check_not_negative("peak_lr", peak_lr)?;
                check(
                    "min_ratio",
                    min_ratio,
                    (0.0..=1.0).contains(&min_ratio),
                    "it must be between 0 and 1",
                )
            }
        }
    }
}

/// The rate inside the warm-up, or `None` after it.
fn warmup(peak: f64, warmup_steps: u64, step: u64) -> Option<f64> {
    (step < warmup_steps).then(|| peak * ((step + 1) as f64 / warmup_steps as f64))
}
