//! The optimizer: construction and one step.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Result, Tensor, Var};
use candle_nn::{Optimizer, VarMap};

use super::fused::Coefficients;
use super::norm::global_norm;
use super::slot::Slot;
use super::{AdamWConfig, OptimError};

/// Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// What one step did.
#[derive(Clone, Copy, Debug, PartialEq)]
#[must_use = "a step may have been skipped"]
pub struct StepReport {
    /// Euclidean norm over all gradients before clipping; not finite when some gradient is not.
    pub grad_norm: f64,
    /// What the gradients were multiplied by: 1 when nothing was clipped, 0 for a skipped step.
    pub clip_coefficient: f64,
    /// The learning rate of this step.
    pub lr: f64,
    /// Whether nothing was changed because the gradient norm was not finite.
    pub skipped: bool,
    /// How many variables were updated.
    pub updated: usize,
}

/// AdamW (decoupled weight decay) over named variables, with a state that can be saved.
///
/// Per variable and step `t` counted from 1, with g the clipped gradient:
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`,
/// `theta = (1 - lr decay) theta - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)`.
///
/// - Variables are ordered by name, whatever order they came in, so sums over them have one order.
/// - Moments are f32 (f64 for f64 variables), also for bf16 and f16 variables, which are updated in
///   f32 and rounded to nearest once.
/// - A variable without a gradient is left alone; the step counter is shared by all, as in
///   candle-nn.
/// - A step whose gradient norm is not finite changes nothing, the step counter included.
/// - Results do not depend on the number of threads.
pub struct AdamW {
    pub(super) slots: Vec<Slot>,
    pub(super) step: u64,
    config: AdamWConfig,
    partials: Vec<f64>,
}

impl AdamW {
    /// An optimizer over named variables.
    ///
    /// Variables of integer dtypes are left out. A variable given under two names (tied weights) is
    /// kept once, under the name that sorts first.
    ///
    /// # Errors
    /// [`OptimError::DuplicateName`], [`OptimError::InvalidHyperparameter`], or candle's when
    /// memory for the moments cannot be had.
    pub fn from_named(
        mut vars: Vec<(String, Var)>,
        config: AdamWConfig,
    ) -> std::result::Result<Self, OptimError> {
        config.validate()?;
        vars.sort_by(|a, b| a.0.cmp(&b.0));
        if let Some(pair) = vars.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            return Err(OptimError::DuplicateName {
                name: pair[0].0.clone(),
            });
        }
        let mut seen = HashSet::new();
        vars.retain(|(_, var)| is_trainable(var.dtype()) && seen.insert(var.id()));
        let slots = vars
            .into_iter()
            .map(|(name, var)| {
                let decays = config.decay_scope.includes(var.rank());
                Slot::new(name, var, decays)
            })
            .collect::<Result<Vec<_>>>()?;
        Ok(Self {
            slots,
            step: 0,
            config,
            partials: Vec::new(),
        })
    }

    /// An optimizer over all variables of a [`VarMap`], under their names there.
    ///
    /// # Errors
    /// As [`AdamW::from_named`].
    pub fn from_varmap(
        varmap: &VarMap,
        config: AdamWConfig,
    ) -> std::result::Result<Self, OptimError> {
        let data = varmap
            .data()
            .lock()
            .map_err(|_| candle_core::Error::msg("the lock of the VarMap is poisoned"))?;
        let vars = data
            .iter()
            .map(|(name, var)| (name.clone(), var.clone()))
            .collect();
        drop(data);
        Self::from_named(vars, config)
    }

    /// Leaves the variables that `no_decay(name, variable)` picks out of weight decay; all others
    /// decay. Replaces what [`AdamWConfig::decay_scope`] decided.
    pub fn with_no_decay(mut self, no_decay: impl Fn(&str, &Tensor) -> bool) -> Self {
        for slot in &mut self.slots {
            slot.decays = !no_decay(&slot.name, &slot.var);
        }
        self
    }

    /// One step with these gradients: clips, updates every variable that has a gradient, and says
    /// what it did. Its report of a skipped step also goes to `tracing` as a warning.
    ///
    /// # Errors
    /// A gradient of another shape or dtype than its variable (before anything is changed), or an
    /// error of the device.
    pub fn apply(&mut self, grads: &GradStore) -> Result<StepReport> {
        let lr = self.config.lr;
        let with_grads: Vec<(usize, &Tensor)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(i, slot)| grads.get(&slot.var).map(|grad| (i, grad)))
            .collect();
        for &(i, grad) in &with_grads {
            check_gradient(&self.slots[i], grad)?;
        }
        let grad_norm = global_norm(with_grads.iter().map(|(_, grad)| *grad), &mut self.partials)?;
        if !grad_norm.is_finite() {
            tracing::warn!(
                grad_norm,
                step = self.step,
                "gradients are not finite: optimizer step skipped"
            );
            return Ok(StepReport {
                grad_norm,
                clip_coefficient: 0.0,
                lr,
                skipped: true,
                updated: 0,
            });
        }
        let clip = match self.config.max_grad_norm {
            Some(limit) => (limit / (grad_norm + CLIP_EPS)).min(1.0),
            None => 1.0,
        };
        self.step += 1;
        let coefficients = self.coefficients(clip);
        for &(i, grad) in &with_grads {
            let slot = &mut self.slots[i];
            let decay = if slot.decays {
                1.0 - lr * self.config.weight_decay
            } else {
                1.0
            };
            slot.update(
                grad,
                &Coefficients {
                    decay,
                    ..coefficients
                },
            )
            .map_err(|error| {
                error.context(format!("optimizer step of variable `{}`", slot.name))
            })?;
        }
        Ok(StepReport {
            grad_norm,
            clip_coefficient: clip,
            lr,
            skipped: false,
            updated: with_grads.len(),
        })
    }

    fn coefficients(&self, clip: f64) -> Coefficients {
        let AdamWConfig {
            lr,
            beta1,
            beta2,
            eps,
            ..
        } = self.config;
        // Past i32::MAX steps both powers are 0 anyway.
        let power = i32::try_from(self.step).unwrap_or(i32::MAX);
        let correction = |beta: f64| 1.0 / (1.0 - beta.powi(power));
        Coefficients {
            lr,
            beta1,
            beta2,
            eps,
            decay: 1.0,
            correction1: correction(beta1),
            correction2: correction(beta2),
            clip,
        }
    }

    /// The hyperparameters, with the learning rate of the next step.
    pub fn config(&self) -> &AdamWConfig {
        &self.config
    }

    /// The learning rate of the next step.
    pub fn lr(&self) -> f64 {
        self.config.lr
    }

    /// Sets the learning rate of the next step, usually to
    /// [`LrSchedule::lr`](super::LrSchedule::lr).
    pub fn set_lr(&mut self, lr: f64) {
        self.config.lr = lr;
    }

    /// Replaces the hyperparameters and keeps moments and step. Which variables decay follows the
    /// new [`AdamWConfig::decay_scope`].
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`]; the old ones stay.
    pub fn set_config(&mut self, config: AdamWConfig) -> std::result::Result<(), OptimError> {
        config.validate()?;
        for slot in &mut self.slots {
            slot.decays = config.decay_scope.includes(slot.var.rank());
        }
        self.config = config;
        Ok(())
    }

    /// Steps taken, skipped ones not counted.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The variables with their names, in the order of the updates.
    pub fn vars(&self) -> impl Iterator<Item = (&str, &Var)> {
        self.slots
            .iter()
            .map(|slot| (slot.name.as_str(), &slot.var))
    }
}

impl std::fmt::Debug for AdamW {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("AdamW")
            .field("vars", &self.slots.len())
            .field("step", &self.step)
            .field("config", &self.config)
            .finish()
    }
}

/// candle-nn's interface. Variables get the names `000000`, `000001`, .. in the order given; prefer
/// [`AdamW::from_named`] or [`AdamW::from_varmap`] when the state is to be saved.
impl Optimizer for AdamW {
    type Config = AdamWConfig;

    fn new(vars: Vec<Var>, config: AdamWConfig) -> Result<Self> {
        let named = vars
            .into_iter()
            .enumerate()
            .map(|(i, var)| (format!("{i:06}"), var))
            .collect();
        Ok(Self::from_named(named, config)?)
    }

    /// As [`AdamW::apply`], without the report.
    fn step(&mut self, grads: &GradStore) -> Result<()> {
        self.apply(grads).map(|_| ())
    }

    fn learning_rate(&self) -> f64 {
        self.lr()
    }

    fn set_learning_rate(&mut self, lr: f64) {
        self.set_lr(lr);
    }
}

fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
}

fn check_gradient(slot: &Slot, grad: &Tensor) -> Result<()> {
    if grad.shape() != slot.shape() || grad.dtype() != slot.var.dtype() {
        candle_core::bail!(
            "gradient of variable `{}`: expected {:?} {:?}, got {:?} {:?}",
            slot.name,
            slot.var.dtype(),
            slot.shape(),
            grad.dtype(),
            grad.shape()
        )
    }
    Ok(())
}
