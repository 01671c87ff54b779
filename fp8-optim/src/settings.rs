//! Hyperparameters that every rule has, and the checks of their values.

use serde::{Deserialize, Serialize};

use super::error::{OptimError, Result};
use super::masters::MasterDType;
use super::moments::MomentStorage;

/// Which variables weight decay acts on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayScope {
    /// Every variable, as in candle-nn's AdamW.
    #[default]
    All,
    /// Only variables of two or more dimensions: biases and the gains of normalization layers do not decay.
    Matrices,
}

impl DecayScope {
    /// Whether a variable with this number of dimensions decays.
    pub fn includes(self, rank: usize) -> bool {
        match self {
            DecayScope::All => true,
            DecayScope::Matrices => rank >= 2,
        }
    }
}

/// The hyperparameters that an [`Engine`](super::Engine) reads itself, whatever its rule is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Learning rate of the next step.
    pub lr: f64,
    /// Weight decay of the variables that decay.
    pub weight_decay: f64,
    /// Which variables decay.
    pub decay_scope: DecayScope,
    /// Gradients are multiplied by `min(1, max_grad_norm / (norm + 1e-6))`; None: no clipping.
    pub max_grad_norm: Option<f64>,
    /// The dtype of master weights; None: no master weights.
    pub masters: Option<MasterDType>,
    /// How moments are stored.
    pub moments: MomentStorage,
    /// Seed of stochastic rounding.
    pub seed: u64,
    /// This many skipped steps in a row are an error; None: never.
    pub max_skipped_steps: Option<u64>,
}

impl Settings {
    pub(super) fn validate(&self) -> Result<()> {
        check_lr(self.lr)?;
        check_not_negative("weight_decay", self.weight_decay)?;
        check_limit(self.max_skipped_steps)?;
        match self.max_grad_norm {
            None => Ok(()),
            Some(limit) => check(
                "max_grad_norm",
                limit,
                limit > 0.,
                "it must be finite and above 0",
            ),
        }
    }
}

/// Fails for an invalid learning rate.
pub(super) fn check_lr(lr: f64) -> Result<()> {
    check_not_negative("lr", lr)
}

pub(super) fn check_not_negative(name: &'static str, value: f64) -> Result<()> {
    check(name, value, value >= 0., "it must be finite and at least 0")
}

/// Fails unless the limit of skipped steps is at least 1.
pub(super) fn check_limit(limit: Option<u64>) -> Result<()> {
    let steps = limit.unwrap_or(1) as f64;
    check(
        "max_skipped_steps",
        steps,
        steps > 0.,
        "it must be at least 1 step",
    )
}

/// Fails with the name and value unless `ok` holds and the value is finite.
pub(super) fn check(name: &'static str, value: f64, ok: bool, allowed: &'static str) -> Result<()> {
    if ok && value.is_finite() {
        return Ok(());
    }
    Err(OptimError::InvalidHyperparameter {
        name,
        value,
        allowed,
    })
}
