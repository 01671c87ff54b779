//! The optimizer: construction and one step.

use std::collections::HashSet;

use candle_core::backprop::GradStore;
use candle_core::{DType, Storage, Tensor, Var};
use candle_nn::{Optimizer, VarMap};

use super::counter::{Counter, correction};
#[cfg(feature = "cuda")]
use super::cuda;
use super::error::Result;
use super::fused::Coefficients;
use super::norm::SumOfSquares;
use super::params::check_lr;
use super::slot::Slot;
use super::{AdamWConfig, OptimError, StepReport};

/// Added to the norm before dividing by it, as `torch.nn.utils.clip_grad_norm_` does.
const CLIP_EPS: f64 = 1e-6;

/// AdamW (decoupled weight decay) over named variables, with a state that can be saved.
///
/// Per variable and step `t` counted from 1, with g the clipped gradient:
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`,
/// `theta = (1 - lr decay) theta - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)`.
///
/// - Variables are ordered by name, whatever order they came in, so sums over them have one order.
/// - Moments are f32 (f64 for f64 variables), also for bf16 and f16 variables, which are updated in
///   f32 and rounded to nearest once. [`AdamWConfig::master_weights`] keeps what that rounds away.
/// - A variable without a gradient is left alone; the step counter is shared by all, as in
///   candle-nn.
/// - A step whose gradient norm is not finite changes nothing, the step counter included.
/// - Results do not depend on the number of threads. With all variables on one CUDA device they are
///   those of the CPU to the bit (the sign of a zero in f64 aside), the norm included.
/// - With all variables on one CUDA device, a step never waits for it: see [`StepReport`].
pub struct AdamW {
    pub(super) slots: Vec<Slot>,
    pub(super) counter: Counter,
    config: AdamWConfig,
    /// A learning rate that is none, from candle's interface.
    refused_lr: Option<f64>,
    sum: SumOfSquares,
    /// Made when a step needs them.
    #[cfg(feature = "cuda")]
    groups: Option<Vec<cuda::Group>>,
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
    pub fn from_named(mut vars: Vec<(String, Var)>, config: AdamWConfig) -> Result<Self> {
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
                Slot::new(name, var, decays, config.master_weights)
            })
            .collect::<candle_core::Result<Vec<_>>>()?;
        #[cfg(feature = "cuda")]
        let counter = cuda::counter(&slots)?;
        #[cfg(not(feature = "cuda"))]
        let counter = Counter::Host(0);
        Ok(Self {
            slots,
            counter,
            config,
            refused_lr: None,
            sum: SumOfSquares::default(),
            #[cfg(feature = "cuda")]
            groups: None,
        })
    }

    /// An optimizer over all variables of a [`VarMap`], under their names there.
    ///
    /// # Errors
    /// As [`AdamW::from_named`].
    pub fn from_varmap(varmap: &VarMap, config: AdamWConfig) -> Result<Self> {
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
        self.slots_changed();
        self
    }

    /// One step with these gradients: clips, updates every variable that has a gradient, and says
    /// what it did. A skipped step is also a warning in `tracing`: at once where the host decides,
    /// and when the report is first read where a CUDA device does.
    ///
    /// With all variables on one CUDA device nothing here copies to the host or waits for the
    /// device. Variables on several devices share one norm, so each CUDA device among them is waited
    /// for once per step. Strided gradients are copied first.
    ///
    /// # Errors
    /// A gradient of another shape, dtype or device than its variable, or a rate that candle's interface could
    /// not refuse (before anything is changed), or an error of the device.
    pub fn apply(&mut self, grads: &GradStore) -> Result<StepReport> {
        self.refused_lr.map_or(Ok(()), check_lr)?;
        let grads = self.gradients(grads)?;
        let done = self.update(&grads);
        // Also after an error in the middle, and a step that turns out to be skipped: to say it too often costs a cast.
        for (slot, _) in self.slots.iter().zip(&grads).filter(|(_, g)| g.is_some()) {
            slot.version.announce_change();
        }
        done
    }

    fn update(&mut self, grads: &[Option<Tensor>]) -> Result<StepReport> {
        #[cfg(feature = "cuda")]
        {
            if self.groups.is_none() {
                self.groups = Some(cuda::groups(&self.slots)?);
            }
            if let (Counter::Device(counter), Some([group])) =
                (&self.counter, self.groups.as_deref_mut())
            {
                let hyper = cuda::hyperparameters(&self.config);
                let outcome = group.step(grads, &hyper, counter)?;
                let updated = grads.iter().flatten().count();
                return Ok(StepReport::on_device(self.config.lr, updated, outcome));
            }
        }
        self.apply_from_host(grads)
    }

    /// The gradient of each slot, detached and in memory of its own.
    fn gradients(&self, grads: &GradStore) -> Result<Vec<Option<Tensor>>> {
        let own: HashSet<usize> = self.slots.iter().map(|slot| address(&slot.var)).collect();
        let found = self.slots.iter().map(|slot| {
            let Some(grad) = grads.get(&slot.var) else {
                return Ok(None);
            };
            check_gradient(slot, grad)?;
            // Updates in place must not change a gradient that is still to be read.
            match own.contains(&address(grad)) {
                true => Ok(Some(grad.detach().copy()?)),
                false => Ok(Some(grad.detach())),
            }
        });
        found.collect()
    }

    /// A step whose norm the host reads.
    fn apply_from_host(&mut self, grads: &[Option<Tensor>]) -> Result<StepReport> {
        let lr = self.config.lr;
        let updated = grads.iter().flatten().count();
        let step = self.counter.get()?;
        self.sum.clear();
        for (slot, grad) in self.slots.iter().zip(grads) {
            if !is_grouped(slot) {
                self.sum.add(slot.var.elem_count(), grad.as_ref())?;
            }
        }
        #[cfg(feature = "cuda")]
        for group in self.groups.iter_mut().flatten() {
            self.sum.add_device_sum(group.sum_of_squares(grads)?)?;
        }
        let grad_norm = self.sum.total()?.sqrt();
        self.sum.clear();
        if !grad_norm.is_finite() {
            return Ok(StepReport::skipped_step(lr, updated, grad_norm, step));
        }
        let clip = match self.config.max_grad_norm {
            Some(limit) => (limit / (grad_norm + CLIP_EPS)).min(1.0),
            None => 1.0,
        };
        self.counter.set(step + 1)?;
        let coefficients = self.coefficients(step + 1, clip);
        for (slot, grad) in self.slots.iter_mut().zip(grads) {
            let Some(grad) = grad else { continue };
            if is_grouped(slot) {
                continue;
            }
            let decay = match slot.decays {
                true => coefficients.decay,
                false => 1.0,
            };
            let own = Coefficients {
                decay,
                ..coefficients
            };
            slot.update(grad, &own).map_err(|error| {
                error.context(format!("optimizer step of variable `{}`", slot.name))
            })?;
        }
        #[cfg(feature = "cuda")]
        for group in self.groups.iter_mut().flatten() {
            let decision = fp8_candle::optim::AdamWDecision {
                correction1: coefficients.correction1,
                correction2: coefficients.correction2,
                clip,
            };
            group.update(grads, &cuda::hyperparameters(&self.config), &decision)?;
        }
        Ok(StepReport::taken(lr, updated, grad_norm, clip))
    }

    fn coefficients(&self, step: u64, clip: f64) -> Coefficients {
        let AdamWConfig {
            lr,
            beta1,
            beta2,
            eps,
            ..
        } = self.config;
        Coefficients {
            lr,
            beta1,
            beta2,
            eps,
            decay: 1.0 - lr * self.config.weight_decay,
            correction1: correction(beta1, step),
            correction2: correction(beta2, step),
            clip,
        }
    }

    /// To be called when moments or decay flags have changed: what was built from them is built
    /// anew.
    pub(super) fn slots_changed(&mut self) {
        #[cfg(feature = "cuda")]
        {
            self.groups = None;
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

    /// Sets the learning rate of the next step, usually [`LrSchedule::lr`](super::LrSchedule::lr).
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`] if `lr` is NaN, infinite or negative; the old one stays.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        check_lr(lr)?;
        self.config.lr = lr;
        self.refused_lr = None;
        Ok(())
    }

    /// Replaces the hyperparameters and keeps moments and step. Which variables decay follows the
    /// new [`AdamWConfig::decay_scope`]. Where [`AdamWConfig::master_weights`] was off, copies are
    /// made of the variables as they are; turned off, they are dropped.
    ///
    /// # Errors
    /// [`OptimError::InvalidHyperparameter`], or candle's when there is no memory for the copies;
    /// the old ones stay.
    pub fn set_config(&mut self, config: AdamWConfig) -> Result<()> {
        config.validate()?;
        let mut changed = Vec::new();
        for (i, slot) in self.slots.iter().enumerate() {
            let wanted = config.master_weights && slot.can_have_master();
            if wanted != slot.has_master() {
                let master = if wanted { slot.new_master()? } else { None };
                changed.push((i, master));
            }
        }
        for (i, master) in changed {
            self.slots[i].set_master(master)?;
        }
        for slot in &mut self.slots {
            slot.decays = config.decay_scope.includes(slot.var.rank());
        }
        self.put_config(config);
        Ok(())
    }

    /// Takes a valid configuration over; decay flags and master copies are the caller's concern.
    pub(super) fn put_config(&mut self, config: AdamWConfig) {
        self.config = config;
        self.refused_lr = None;
        self.slots_changed();
    }

    /// Steps taken, skipped ones not counted. With all variables on one CUDA device, the device
    /// counts, and this waits for it.
    ///
    /// # Errors
    /// candle's, when the count cannot be copied from the device.
    pub fn steps(&self) -> Result<u64> {
        Ok(self.counter.get()?)
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
        let mut all = f.debug_struct("AdamW");
        all.field("vars", &self.slots.len());
        match &self.counter {
            Counter::Host(step) => all.field("step", step),
            // Not worth waiting for the device.
            #[cfg(feature = "cuda")]
            Counter::Device(_) => all.field("step", &"on the device"),
        };
        all.field("config", &self.config).finish()
    }
}

/// candle-nn's interface. Variables get the names `000000`, `000001`, .. in the order given; prefer
/// [`AdamW::from_named`] or [`AdamW::from_varmap`] when the state is to be saved.
impl Optimizer for AdamW {
    type Config = AdamWConfig;

    fn new(vars: Vec<Var>, config: AdamWConfig) -> candle_core::Result<Self> {
        let named = vars
            .into_iter()
            .enumerate()
            .map(|(i, var)| (format!("{i:06}"), var))
            .collect();
        Ok(Self::from_named(named, config)?)
    }

    /// As [`AdamW::apply`], without the report.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        let _ = self.apply(grads)?;
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.lr()
    }

    /// As [`AdamW::set_lr`]. This interface cannot refuse a rate, so the next step fails and changes nothing.
    fn set_learning_rate(&mut self, lr: f64) {
        if self.set_lr(lr).is_err() {
            self.refused_lr = Some(lr);
        }
    }
}

fn is_trainable(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16)
}

/// Whether the variable is updated together with all others of its CUDA device.
fn is_grouped(slot: &Slot) -> bool {
    cfg!(feature = "cuda") && slot.var.device().is_cuda()
}

/// Tells memory from memory.
fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref::<Storage>(&tensor.storage_and_layout().0) as usize
}

fn check_gradient(slot: &Slot, grad: &Tensor) -> Result<()> {
    if !grad.device().same_device(slot.var.device()) {
        return Err(OptimError::GradientDevice {
            name: slot.name.clone(),
            expected: slot.var.device().location(),
            got: grad.device().location(),
        });
    }
    if grad.shape() != slot.shape() || grad.dtype() != slot.var.dtype() {
        return Err(OptimError::Gradient {
            name: slot.name.clone(),
            expected_dtype: slot.var.dtype(),
            expected_shape: slot.shape().clone(),
            got_dtype: grad.dtype(),
            got_shape: grad.shape().clone(),
        });
    }
    Ok(())
}
