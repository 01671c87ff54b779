//! The optimizer: construction and one step.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, VarMap};

use super::counter::{Counter, correction};
#[cfg(feature = "cuda")]
use super::cuda;
use super::error::Result;
use super::fused::Coefficients;
use super::groups::Groups;
use super::masters::Kept;
use super::named::{gradients, numbered, of_varmap, sorted};
use super::norm::{SumOfSquares, clip_coefficient};
use super::params::check_lr;
use super::slot::Slot;
use super::{AdamWConfig, ParamGroup, StepReport};

/// AdamW (decoupled weight decay) over named variables, with a state that can be saved.
///
/// Per variable and step `t` counted from 1, with g the clipped gradient:
/// `m = beta1 m + (1 - beta1) g`, `v = beta2 v + (1 - beta2) g^2`,
/// `theta = (1 - lr decay) theta - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)`.
///
/// - Variables are ordered by name, whatever order they came in, so sums over them have one order.
/// - Moments are f32 (f64 for f64 variables), also for bf16 and f16 variables, which are updated in
///   f32 and rounded to nearest once. [`AdamWConfig::master_weights`] keeps what that rounds away.
/// - [`AdamW::with_groups`] gives some variables a learning rate and weight decay of their own.
/// - A variable without a gradient is left alone; the step counter is shared by all, as in
///   candle-nn.
/// - A step whose gradient norm is not finite changes nothing, the step counter included.
/// - Results do not depend on the number of threads. With all variables on one CUDA device they are
///   those of the CPU to the bit (the sign of a zero in f64 aside), the norm included.
/// - With all variables on one CUDA device, a step never waits for it: see [`StepReport`]. Variables in groups and with masters in
///   bf16 or f16 are updated by candle's operations there, and then the host reads the norm.
///
/// ```
/// # use candle_core::{DType, Device, Var};
/// # use fp8_recipes::optim::{AdamW, AdamWConfig, ParamGroup};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let config = AdamWConfig { lr: 0.25, weight_decay: 0., ..Default::default() };
/// let mut optimizer = AdamW::from_named(vec![("w".into(), w.clone())], config)?;
/// let report = optimizer.apply(&w.sqr()?.sum_all()?.backward()?)?;
/// assert!(!report.skipped()?);
/// // The first step goes by the learning rate, whatever the size of the gradient.
/// assert!(w.to_vec1::<f32>()?.iter().all(|w| (w - 0.75).abs() < 1e-6));
/// # Ok(()) }
/// ```
pub struct AdamW {
    pub(super) slots: Vec<Slot>,
    pub(super) counter: Counter,
    config: AdamWConfig,
    /// A learning rate that is none, from candle's interface.
    refused_lr: Option<f64>,
    sum: SumOfSquares,
    pub(super) groups: Groups,
    /// Made when a step needs them.
    #[cfg(feature = "cuda")]
    devices: Option<Vec<cuda::Group>>,
}

impl AdamW {
    /// An optimizer over named variables.
    ///
    /// Variables of integer dtypes are left out, or refused where the configuration asks for master weights. A variable given under two names (tied weights) is
    /// kept once, under the name that sorts first.
    ///
    /// # Errors
    /// [`DuplicateName`](super::OptimError::DuplicateName), [`MasterOfInteger`](super::OptimError::MasterOfInteger),
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter), or candle's when memory for the moments cannot be had.
    pub fn from_named(vars: Vec<(String, Var)>, config: AdamWConfig) -> Result<Self> {
        config.validate()?;
        let vars = sorted(vars, config.master_weights)?;
        let slots = vars
            .into_iter()
            .map(|(name, var)| {
                let decays = config.decay_scope.includes(var.rank());
                Slot::new(name, var, decays, config.masters())
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
            groups: Groups::default(),
            #[cfg(feature = "cuda")]
            devices: None,
        })
    }

    /// An optimizer over all variables of a [`VarMap`], under their names there.
    ///
    /// # Errors
    /// As [`AdamW::from_named`].
    pub fn from_varmap(varmap: &VarMap, config: AdamWConfig) -> Result<Self> {
        Self::from_named(of_varmap(varmap)?, config)
    }

    /// Gives variables hyperparameters of their own; replaces the groups that there were.
    ///
    /// # Errors
    /// [`NoSuchVariable`](super::OptimError::NoSuchVariable) for a pattern that names no variable, and
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter).
    pub fn with_groups(mut self, groups: Vec<ParamGroup>) -> Result<Self> {
        self.groups = Groups::new(groups, self.names())?;
        self.slots_changed();
        Ok(self)
    }

    /// The groups, in the order given.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::{AdamW, AdamWConfig, ParamGroup};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// let optimizer = AdamW::from_named(vec![("w".into(), w)], AdamWConfig::default())?
    ///     .with_groups(vec![ParamGroup::new("w")?.with_lr_factor(2.)])?;
    /// assert_eq!(optimizer.groups()[0].lr(0.1), 0.2);
    /// # Ok(()) }
    /// ```
    pub fn groups(&self) -> &[ParamGroup] {
        self.groups.all()
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.slots.iter().map(|slot| slot.name.as_str())
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
        let vars = self
            .slots
            .iter()
            .map(|slot| (slot.name.as_str(), &slot.var));
        let grads = gradients(vars, grads)?;
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
            if self.devices.is_none() {
                self.devices = Some(cuda::groups(&self.slots, &self.groups)?);
            }
            let by_kernels = |i: usize| cuda::by_kernels(&self.slots, &self.groups, i, grads);
            let all = (0..self.slots.len()).all(by_kernels);
            if let (true, Counter::Device(counter), Some([group])) =
                (all, &self.counter, self.devices.as_deref_mut())
            {
                let hyper = cuda::hyperparameters(&self.config);
                let outcome = group.step(grads, &hyper, counter)?;
                let updated = grads.iter().flatten().count();
                return Ok(StepReport::on_device(self.config.lr, updated, outcome));
            }
        }
        self.apply_from_host(grads)
    }

    /// A step whose norm the host reads.
    fn apply_from_host(&mut self, grads: &[Option<Tensor>]) -> Result<StepReport> {
        let lr = self.config.lr;
        let updated = grads.iter().flatten().count();
        let step = self.counter.get()?;
        self.sum.clear();
        let by_kernels: Vec<bool> = (0..self.slots.len())
            .map(|i| self.by_kernels(i, grads))
            .collect();
        for ((slot, grad), by_kernels) in self.slots.iter().zip(grads).zip(&by_kernels) {
            if !by_kernels {
                self.sum.add(slot.var.elem_count(), grad.as_ref())?;
            }
        }
        #[cfg(feature = "cuda")]
        let for_kernels: Vec<Option<Tensor>> = (grads.iter().zip(&by_kernels))
            .map(|(grad, own)| grad.clone().filter(|_| *own))
            .collect();
        #[cfg(feature = "cuda")]
        for group in self.devices.iter_mut().flatten() {
            self.sum
                .add_device_sum(group.sum_of_squares(&for_kernels)?)?;
        }
        let grad_norm = self.sum.total()?.sqrt();
        self.sum.clear();
        if !grad_norm.is_finite() {
            return Ok(StepReport::skipped_step(lr, updated, grad_norm, step));
        }
        let clip = clip_coefficient(self.config.max_grad_norm, grad_norm);
        self.counter.set(step + 1)?;
        let coefficients = self.coefficients(step + 1, clip);
        let AdamWConfig {
            weight_decay, seed, ..
        } = self.config;
        #[cfg(feature = "cuda")]
        let mut replaced = false;
        for (i, (slot, grad)) in self.slots.iter_mut().zip(grads).enumerate() {
            let (Some(grad), false) = (grad, by_kernels[i]) else {
                continue;
            };
            let (lr, decay) = self.groups.rates(i, lr, weight_decay, slot.decays);
            let own = Coefficients {
                lr,
                decay: 1.0 - lr * decay,
                ..coefficients
            };
            #[cfg(feature = "cuda")]
            {
                replaced |= slot.var.device().is_cuda();
            }
            let key = slot.kept.key(seed, step + 1, i as u32);
            slot.update(grad, &own, key).map_err(|error| {
                error.context(format!("optimizer step of variable `{}`", slot.name))
            })?;
        }
        #[cfg(feature = "cuda")]
        for group in self.devices.iter_mut().flatten() {
            let decision = fp8_candle::optim::AdamWDecision {
                correction1: coefficients.correction1,
                correction2: coefficients.correction2,
                clip,
            };
            group.update(
                &for_kernels,
                &cuda::hyperparameters(&self.config),
                &decision,
            )?;
        }
        // Their moments are other tensors now.
        #[cfg(feature = "cuda")]
        if replaced {
            self.slots_changed();
        }
        Ok(StepReport::taken(lr, updated, grad_norm, clip))
    }

    /// Whether kernels update variable number `i`, together with others of its CUDA device.
    fn by_kernels(&self, i: usize, grads: &[Option<Tensor>]) -> bool {
        #[cfg(feature = "cuda")]
        return cuda::by_kernels(&self.slots, &self.groups, i, grads);
        #[cfg(not(feature = "cuda"))]
        {
            let _ = (i, grads);
            false
        }
    }

    /// Those of a variable without a group that does not decay.
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
            decay: 1.0,
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
            self.devices = None;
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
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) if `lr` is NaN, infinite or negative; the old one stays.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        check_lr(lr)?;
        self.config.lr = lr;
        self.refused_lr = None;
        Ok(())
    }

    /// Replaces the hyperparameters and keeps moments and step. Which variables decay follows the
    /// new [`AdamWConfig::decay_scope`]. Where [`AdamWConfig::master_weights`] was off or of another dtype, copies
    /// are made of the variables as they are; turned off, they are dropped.
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter), or candle's when there is no memory for the copies;
    /// the old ones stay.
    pub fn set_config(&mut self, config: AdamWConfig) -> Result<()> {
        config.validate()?;
        let mut changed = Vec::new();
        for (i, slot) in self.slots.iter().enumerate() {
            let kept = Kept::of(&slot.var, config.masters());
            if kept != slot.kept {
                changed.push((i, kept, kept.new_copy(&slot.var)?));
            }
        }
        for (i, kept, copy) in changed {
            self.slots[i].keep(kept, copy)?;
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
        Ok(Self::from_named(numbered(vars), config)?)
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
