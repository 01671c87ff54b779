//! The optimizer: construction and settings.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, VarMap};

use super::counter::Counter;
#[cfg(feature = "cuda")]
use super::cuda;
use super::error::Result;
use super::groups::Groups;
use super::masters::Kept;
use super::named::{numbered, of_varmap, sorted};
use super::norm::SumOfSquares;
use super::params::check_lr;
use super::slot::Slot;
use super::veto::SkipStreak;
use super::{AdamWConfig, ParamGroup};

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
/// - A step whose gradient norm is not finite changes nothing, the step counter included; nor does one in which a cast of the model
///   has seen Inf or NaN, which a saturating cast makes finite. After [`AdamWConfig::max_skipped_steps`] of them in a row: an error.
/// - Results do not depend on the number of threads. With all variables on one CUDA device they are
///   those of the CPU to the bit (the sign of a zero in f64 aside), the norm included.
/// - With all variables on one CUDA device, a step never waits for it: see [`StepReport`](super::StepReport). Variables in groups and with masters in
///   bf16 or f16 are updated by candle's operations there, and then the host reads the norm.
///
/// ```
/// # use candle_core::{DType, Device, Var};
/// # use fp8_recipes::optim::{AdamW, AdamWConfig};
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
    pub(super) config: AdamWConfig,
    /// A learning rate that is none, from candle's interface.
    pub(super) refused_lr: Option<f64>,
    pub(super) sum: SumOfSquares,
    pub(super) groups: Groups,
    pub(super) streak: SkipStreak,
    /// Made when a step needs them.
    #[cfg(feature = "cuda")]
    pub(super) devices: Option<Vec<cuda::Group>>,
}

impl AdamW {
    /// An optimizer over named variables.
    ///
    /// Variables of integer dtypes are left out, or refused where the configuration asks for master weights. A variable given under two names (tied weights) is
    /// kept once, under the name that sorts first.
    ///
    /// # Errors
    /// [`DuplicateName`](super::OptimError::DuplicateName), [`MasterOfInteger`](super::OptimError::MasterOfInteger),
    /// [`MasterOverflow`](super::OptimError::MasterOverflow),
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
            .collect::<Result<Vec<_>>>()?;
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
            streak: SkipStreak::default(),
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
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter),
    /// [`MasterOverflow`](super::OptimError::MasterOverflow), or candle's when there is no memory for the copies;
    /// the old ones stay.
    pub fn set_config(&mut self, config: AdamWConfig) -> Result<()> {
        config.validate()?;
        let mut changed = Vec::new();
        for (i, slot) in self.slots.iter().enumerate() {
            let kept = Kept::of(&slot.var, config.masters());
            if kept != slot.kept {
                changed.push((i, kept, kept.new_copy(&slot.name, &slot.var)?));
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
        self.apply(grads)?;
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
