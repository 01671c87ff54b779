//! The hyperparameters of AdamW.

use serde::{Deserialize, Serialize};

use super::{MasterDType, OptimError};

/// Which variables weight decay acts on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DecayScope {
    /// Every variable, as candle-nn's AdamW does.
    #[default]
    All,
    /// Only variables of two or more dimensions: biases and the gains of normalization layers are
    /// left out.
    Matrices,
}

impl DecayScope {
    /// Whether a variable of this many dimensions decays.
    pub fn includes(self, rank: usize) -> bool {
        match self {
            DecayScope::All => true,
            DecayScope::Matrices => rank >= 2,
        }
    }
}

/// The hyperparameters of [`AdamW`](super::AdamW). The defaults are candle-nn's, without clipping.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdamWConfig {
    /// Learning rate of the next step; [`AdamW::set_lr`](super::AdamW::set_lr) changes it. Default
    /// 1e-3.
    pub lr: f64,
    /// Decay of the running mean of gradients, in [0, 1). Default 0.9.
    pub beta1: f64,
    /// Decay of the running mean of squared gradients, in [0, 1). Default 0.999.
    pub beta2: f64,
    /// Added to the root of the second moment. Default 1e-8.
    pub eps: f64,
    /// Decoupled weight decay: a variable is multiplied by `1 - lr * weight_decay`. Default 0.01.
    pub weight_decay: f64,
    /// Which variables decay. Default: all.
    pub decay_scope: DecayScope,
    /// Gradients are multiplied by `min(1, max_grad_norm / (norm + 1e-6))`, where `norm` is the
    /// Euclidean norm over all gradients of all variables (the formula of
    /// `torch.nn.utils.clip_grad_norm_`). Default: no clipping.
    pub max_grad_norm: Option<f64>,
    /// Whether the optimizer keeps a master copy of every variable of another dtype than
    /// [`AdamWConfig::master_dtype`], which it updates and then rounds into the variable: updates
    /// below half a unit in the variable's last place add up instead of being lost. Where the
    /// variable no longer is its copy rounded, because somebody has written to it, its own value
    /// counts. Default: false.
    pub master_weights: bool,
    /// The dtype of master copies, see [`MasterDType`]. Default: f32, for bf16 and f16 variables.
    pub master_dtype: MasterDType,
    /// Seed of the bits by which 16-bit masters are rounded. Default 0.
    pub seed: u64,
    /// So many steps left out in a row, because of Inf or NaN, are an error that names where those came from
    /// ([`OptimError::TooManySkipped`]); None: never. Where a CUDA device decides about its steps, those count whose reports are read.
    /// Default 100.
    pub max_skipped_steps: Option<u64>,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            decay_scope: DecayScope::All,
            max_grad_norm: None,
            master_weights: false,
            master_dtype: MasterDType::F32,
            seed: 0,
            max_skipped_steps: Some(100),
        }
    }
}

impl AdamWConfig {
    /// The dtype of master copies, if there are any.
    pub(super) fn masters(&self) -> Option<MasterDType> {
        self.master_weights.then_some(self.master_dtype)
    }

    /// Checks that every value is finite and in range.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`] with the name and value of the first field at fault.
    pub fn validate(&self) -> Result<(), OptimError> {
        let not_negative = "it must be finite and at least 0";
        let below_one = "it must be at least 0 and below 1";
        check_lr(self.lr)?;
        check(
            "beta1",
            self.beta1,
            (0.0..1.0).contains(&self.beta1),
            below_one,
        )?;
        check(
            "beta2",
            self.beta2,
            (0.0..1.0).contains(&self.beta2),
            below_one,
        )?;
        check("eps", self.eps, self.eps >= 0.0, not_negative)?;
        check(
            "weight_decay",
            self.weight_decay,
            self.weight_decay >= 0.0,
            not_negative,
        )?;
        check_limit(self.max_skipped_steps)?;
        if let Some(limit) = self.max_grad_norm {
            check(
                "max_grad_norm",
                limit,
                limit > 0.0,
                "it must be finite and above 0",
            )?;
        }
        Ok(())
    }
}

/// Fails unless a step can be taken with this learning rate.
pub(super) fn check_lr(lr: f64) -> Result<(), OptimError> {
    check("lr", lr, lr >= 0.0, "it must be finite and at least 0")
}

/// Fails with the name and value unless `ok` holds and the value is finite.
pub(super) fn check(
    name: &'static str,
    value: f64,
    ok: bool,
    allowed: &'static str,
) -> Result<(), OptimError> {
    if ok && value.is_finite() {
        Ok(())
    } else {
        Err(OptimError::InvalidHyperparameter {
            name,
            value,
            allowed,
        })
    }
}

/// Fails unless the limit of skipped steps is at least 1.
pub(super) fn check_limit(limit: Option<u64>) -> Result<(), OptimError> {
    let steps = limit.unwrap_or(1) as f64;
    check(
        "max_skipped_steps",
        steps,
        steps > 0.,
        "it must be at least 1 step",
    )
}
