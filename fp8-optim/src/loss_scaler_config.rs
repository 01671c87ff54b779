//! The configuration of loss scaling.

use fp8_core::setters;
use serde::{Deserialize, Serialize};

use super::error::Result;
use super::settings::{check, check_limit};

/// The lowest loss scale. It and its reciprocal are normal f32 numbers.
const LOWEST: f64 = 1. / (1u128 << 126) as f64;
const HIGHEST: f64 = (1u128 << 126) as f64;

/// How a [`DynamicLossScaler`](super::DynamicLossScaler) adjusts its loss scale. The defaults are those of the FP8 Emulation Toolkit.
///
/// ```
/// use fp8_optim::{DynamicLossScaler, LossScalerConfig};
/// let config = LossScalerConfig::default()
///     .with_initial_loss_scale(1024.)
///     .with_growth_interval(100)
///     .with_min_loss_scale(1.);
/// assert_eq!(DynamicLossScaler::new(config)?.loss_scale(), 1024.);
///
/// let config = LossScalerConfig::default().with_initial_loss_scale(f64::INFINITY);
/// let error = DynamicLossScaler::new(config).unwrap_err().to_string();
/// assert!(error.starts_with("initial_loss_scale = inf is not allowed"), "{error}");
/// # Ok::<(), fp8_optim::OptimError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct LossScalerConfig {
    /// The loss scale of the first step. Default 2^16.
    pub initial_loss_scale: f64,
    /// What the loss scale is multiplied by after [`LossScalerConfig::growth_interval`] clean steps; 1 keeps it. Default 2.
    pub growth_factor: f64,
    /// Clean steps in a row before the loss scale grows. Default 2000.
    pub growth_interval: u64,
    /// What the loss scale is multiplied by after a step that was skipped; 1 keeps it. Default 0.5.
    pub backoff_factor: f64,
    /// The highest loss scale. Default 2^24.
    pub max_loss_scale: f64,
    /// The lowest loss scale. Default: 2^-126.
    pub min_loss_scale: Option<f64>,
    /// Whether f16 gradients become f32 when they are divided by the loss scale, see
    /// [`DynamicLossScaler::unscale`](super::DynamicLossScaler::unscale). Default: true.
    pub f32_gradients: bool,
    /// As [`AdamWConfig::max_skipped_steps`](super::AdamWConfig::max_skipped_steps), for steps that the scaler skips. Default 100.
    pub max_skipped_steps: Option<u64>,
}

impl Default for LossScalerConfig {
    fn default() -> Self {
        Self {
            initial_loss_scale: 65536.,
            growth_factor: 2.,
            growth_interval: 2000,
            backoff_factor: 0.5,
            max_loss_scale: 16_777_216.,
            min_loss_scale: None,
            f32_gradients: true,
            max_skipped_steps: Some(100),
        }
    }
}

setters! { LossScalerConfig:
    with_initial_loss_scale(initial_loss_scale: f64);
    with_growth_factor(growth_factor: f64);
    with_growth_interval(growth_interval: u64);
    with_backoff_factor(backoff_factor: f64);
    with_max_loss_scale(max_loss_scale: f64);
    with_min_loss_scale(min_loss_scale: f64);
    with_f32_gradients(f32_gradients: bool);
    with_max_skipped_steps(max_skipped_steps: impl Into<Option<u64>>);
}

impl LossScalerConfig {
    /// Checks that loss scales are powers of two from 2^-126 to 2^126, the first one between floor and cap, and that factors are
    /// powers of two on their side of 1.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) with the name and value of the first field at
    /// fault.
    pub fn validate(&self) -> Result<()> {
        check_limit(self.max_skipped_steps)?;
        check_loss_scale("max_loss_scale", self.max_loss_scale, LOWEST, HIGHEST)?;
        if let Some(floor) = self.min_loss_scale {
            check_loss_scale("min_loss_scale", floor, LOWEST, self.max_loss_scale)?;
        }
        check_loss_scale(
            "initial_loss_scale",
            self.initial_loss_scale,
            self.lowest(),
            self.max_loss_scale,
        )?;
        let (grow, back) = (self.growth_factor, self.backoff_factor);
        check(
            "growth_factor",
            grow,
            is_power_of_two(grow) && (1. ..=HIGHEST).contains(&grow),
            "it must be a power of two of at least 1",
        )?;
        check(
            "backoff_factor",
            back,
            is_power_of_two(back) && (LOWEST..=1.).contains(&back),
            "it must be a power of two above 0, at most 1",
        )?;
        check(
            "growth_interval",
            self.growth_interval as f64,
            self.growth_interval > 0,
            "it must be at least 1 step",
        )
    }

    /// The lowest loss scale allowed.
    pub(super) fn lowest(&self) -> f64 {
        self.min_loss_scale.unwrap_or(LOWEST)
    }
}

fn is_power_of_two(x: f64) -> bool {
    x.is_normal() && x > 0. && x.to_bits() << 12 == 0
}

/// Fails unless `value` is a loss scale between `low` and `high`.
pub(super) fn check_loss_scale(name: &'static str, value: f64, low: f64, high: f64) -> Result<()> {
    check(
        name,
        value,
        is_power_of_two(value) && (low..=high).contains(&value),
        "it must be a power of two, so that it rounds nothing, from min_loss_scale (2^-126 if there is none) to \
         max_loss_scale (2^126 at most)",
    )
}
