//! The hyperparameters of SGD.

use serde::{Deserialize, Serialize};

use super::error::Result;
use super::params::check_limit;
use super::params::{check, check_lr};
use super::{DecayScope, MasterDType};

/// The hyperparameters of [`Sgd`](super::Sgd). The defaults are torch's: no momentum, no decay, and no clipping.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::optim::SgdConfig;
/// let config = SgdConfig::default().with_lr(0.1).with_momentum(0.9).with_nesterov(true);
/// assert!(config.validate().is_ok());
/// let error = config.with_dampening(0.5).validate().unwrap_err().to_string();
/// assert!(error.starts_with("dampening = 0.5 is not allowed"), "{error}");
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct SgdConfig {
    /// Learning rate of the next step; [`Sgd::set_lr`](super::Sgd::set_lr) changes it. Default 1e-3.
    pub lr: f64,
    /// What the momentum buffer is multiplied by before the gradient is added, in [0, 1). 0, the default, for no momentum.
    pub momentum: f64,
    /// The gradient is added to the buffer times `1 - dampening`, but for the first one. In [0, 1]. Default 0.
    pub dampening: f64,
    /// Nesterov's momentum, which wants a momentum above 0 and no dampening. Default: false.
    pub nesterov: bool,
    /// Times the variable, it is added to the gradient after clipping. Default 0.
    pub weight_decay: f64,
    /// Which variables decay. Default: all.
    pub decay_scope: DecayScope,
    /// As [`AdamWConfig::max_grad_norm`](super::AdamWConfig::max_grad_norm). Default: no clipping.
    pub max_grad_norm: Option<f64>,
    /// The dtype of master weights. Default: none are kept.
    pub masters: Option<MasterDType>,
    /// Seed of the bits by which 16-bit masters are rounded. Default 0.
    pub seed: u64,
    /// As [`AdamWConfig::max_skipped_steps`](super::AdamWConfig::max_skipped_steps). Default 100.
    pub max_skipped_steps: Option<u64>,
}

impl Default for SgdConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            momentum: 0.,
            dampening: 0.,
            nesterov: false,
            weight_decay: 0.,
            decay_scope: DecayScope::All,
            max_grad_norm: None,
            masters: None,
            seed: 0,
            max_skipped_steps: Some(100),
        }
    }
}

impl SgdConfig {
    /// The same with another [`SgdConfig::lr`].
    pub fn with_lr(mut self, lr: f64) -> Self {
        self.lr = lr;
        self
    }

    /// The same with another [`SgdConfig::momentum`].
    pub fn with_momentum(mut self, momentum: f64) -> Self {
        self.momentum = momentum;
        self
    }

    /// The same with another [`SgdConfig::dampening`].
    pub fn with_dampening(mut self, dampening: f64) -> Self {
        self.dampening = dampening;
        self
    }

    /// The same with or without [`SgdConfig::nesterov`].
    pub fn with_nesterov(mut self, nesterov: bool) -> Self {
        self.nesterov = nesterov;
        self
    }

    /// The same with another [`SgdConfig::weight_decay`].
    pub fn with_weight_decay(mut self, weight_decay: f64) -> Self {
        self.weight_decay = weight_decay;
        self
    }

    /// The same with another [`SgdConfig::decay_scope`].
    pub fn with_decay_scope(mut self, scope: DecayScope) -> Self {
        self.decay_scope = scope;
        self
    }

    /// The same with clipping, [`SgdConfig::max_grad_norm`].
    pub fn with_max_grad_norm(mut self, limit: f64) -> Self {
        self.max_grad_norm = Some(limit);
        self
    }

    /// The same with master weights, [`SgdConfig::masters`].
    pub fn with_masters(mut self, masters: MasterDType) -> Self {
        self.masters = Some(masters);
        self
    }

    /// The same with another [`SgdConfig::seed`].
    pub fn with_seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// The same with another [`SgdConfig::max_skipped_steps`].
    pub fn with_max_skipped_steps(mut self, steps: impl Into<Option<u64>>) -> Self {
        self.max_skipped_steps = steps.into();
        self
    }

    /// Checks that every value is finite and in range.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) with the name and value of the first field at
    /// fault.
    pub fn validate(&self) -> Result<()> {
        check_lr(self.lr)?;
        check(
            "momentum",
            self.momentum,
            (0.0..1.0).contains(&self.momentum) && !(self.nesterov && self.momentum == 0.),
            "it must be at least 0 and below 1, and above 0 with nesterov",
        )?;
        check(
            "dampening",
            self.dampening,
            (0.0..=1.0).contains(&self.dampening) && !(self.nesterov && self.dampening != 0.),
            "it must be between 0 and 1, and 0 with nesterov",
        )?;
        check(
            "weight_decay",
            self.weight_decay,
            self.weight_decay >= 0.,
            "it must be finite and at least 0",
        )?;
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
