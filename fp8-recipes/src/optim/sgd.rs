//! Stochastic gradient descent: construction and one step.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use candle_nn::{Optimizer, VarMap};
use fp8_candle::profile;

use super::error::Result;
use super::groups::Groups;
use super::masters::Kept;
use super::named::{gradients, numbered, of_varmap, sorted};
use super::norm::{SumOfSquares, clip_coefficient};
use super::params::check_lr;
use super::sgd_slot::{Rates, SgdSlot};
use super::veto::{CastVeto, SkipStreak};
use super::{ParamGroup, SgdConfig, StepReport};

/// Stochastic gradient descent over named variables, with momentum, dampening, Nesterov's momentum and weight decay as in
/// [`torch.optim.SGD`](https://docs.pytorch.org/docs/stable/generated/torch.optim.SGD.html), and a state that can be saved.
///
/// Per variable, with g the clipped gradient: `g += decay theta`; with momentum `b = momentum b + (1 - dampening) g`, or `b = g` for
/// the first gradient, and `g = b`, or with Nesterov `g += momentum b`; last `theta -= lr g`. Without momentum and decay it gives
/// the bits of candle-nn's SGD for f32 and f64 variables.
///
/// - Variables are ordered by name, whatever order they came in.
/// - Momentum buffers are f32 (f64 for f64 variables), also for bf16 and f16 variables, which are updated in f32 and rounded to nearest
///   once. [`SgdConfig::masters`] keeps what that rounds away.
/// - A variable without a gradient is left alone, its momentum too.
/// - A step whose gradient norm is not finite changes nothing, the step counter included; nor does one in which a cast of the model
///   has seen Inf or NaN. After [`SgdConfig::max_skipped_steps`] of them in a row: an error.
/// - Results do not depend on the number of threads. On accelerators candle's operations compute the update, and the host reads the
///   norm once per step.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Var};
/// use fp8::optim::{Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let config = SgdConfig::default().with_lr(0.125).with_momentum(0.5);
/// let mut optimizer = Sgd::from_named(vec![("w".into(), w.clone())], config)?;
/// for _ in 0..2 {
///     // The gradient is 2 each time: the buffer is 2, then 3.
///     let report = optimizer.apply(&(&*w * 2.)?.sum_all()?.backward()?)?;
///     assert!(!report.skipped()?);
/// }
/// assert_eq!(w.to_vec1::<f32>()?, [0.375; 3]);
/// # Ok(()) }
/// ```
pub struct Sgd {
    pub(super) slots: Vec<SgdSlot>,
    pub(super) step: u64,
    pub(super) groups: Groups,
    config: SgdConfig,
    /// A learning rate that is none, from candle's interface.
    refused_lr: Option<f64>,
    sum: SumOfSquares,
    streak: SkipStreak,
}

impl Sgd {
    /// An optimizer over named variables.
    ///
    /// Variables of integer dtypes are left out, or refused where the configuration asks for master weights. A variable given under
    /// two names (tied weights) is kept once, under the name that sorts first.
    ///
    /// # Errors
    /// [`DuplicateName`](super::OptimError::DuplicateName), [`MasterOfInteger`](super::OptimError::MasterOfInteger),
    /// [`MasterOverflow`](super::OptimError::MasterOverflow),
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter), or candle's when memory for master weights cannot be had.
    pub fn from_named(vars: Vec<(String, Var)>, config: SgdConfig) -> Result<Self> {
        config.validate()?;
        let slots = sorted(vars, config.masters.is_some())?.into_iter();
        let slots = slots.map(|(name, var)| {
            let decays = config.decay_scope.includes(var.rank());
            let kept = Kept::of(&var, config.masters);
            SgdSlot::new(name, var, decays, kept)
        });
        Ok(Self {
            slots: slots.collect::<Result<_>>()?,
            step: 0,
            groups: Groups::default(),
            config,
            refused_lr: None,
            sum: SumOfSquares::default(),
            streak: SkipStreak::default(),
        })
    }

    /// An optimizer over all variables of a [`VarMap`], under their names there.
    ///
    /// # Errors
    /// As [`Sgd::from_named`].
    pub fn from_varmap(varmap: &VarMap, config: SgdConfig) -> Result<Self> {
        Self::from_named(of_varmap(varmap)?, config)
    }

    /// Gives variables hyperparameters of their own; replaces the groups that there were.
    ///
    /// # Errors
    /// [`NoSuchVariable`](super::OptimError::NoSuchVariable) for a pattern that names no variable, and
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter).
    pub fn with_groups(mut self, groups: Vec<ParamGroup>) -> Result<Self> {
        self.groups = Groups::new(groups, self.names())?;
        Ok(self)
    }

    /// The groups, in the order given.
    pub fn groups(&self) -> &[ParamGroup] {
        self.groups.all()
    }

    /// Leaves the variables that `no_decay(name, variable)` picks out of weight decay; all others decay, but where their group says
    /// otherwise. Replaces what [`SgdConfig::decay_scope`] decided.
    pub fn with_no_decay(mut self, no_decay: impl Fn(&str, &Tensor) -> bool) -> Self {
        for slot in &mut self.slots {
            slot.decays = !no_decay(&slot.name, &slot.var);
        }
        self
    }

    /// One step with these gradients: clips, updates every variable that has a gradient, and says what it did. A skipped step is also
    /// a warning in `tracing`.
    ///
    /// # Errors
    /// A gradient of another shape or device than its variable, or of a dtype that is neither its own nor f32 for a 16-bit one, or a rate that
    /// candle's interface could not refuse (before anything is changed), [`TooManySkipped`](super::OptimError::TooManySkipped), or an error
    /// of the device.
    pub fn apply(&mut self, grads: &GradStore) -> Result<StepReport> {
        let _scope = profile::enter(profile::Kind::Optimizer);
        self.refused_lr.map_or(Ok(()), check_lr)?;
        let vars = self
            .slots
            .iter()
            .map(|slot| (slot.name.as_str(), &slot.var));
        let grads = gradients(vars, grads)?;
        let seen = CastVeto::of(self.slots.iter().map(|slot| &slot.version))?;
        let done = self.update(&grads, seen);
        // Also after an error in the middle: to say it too often costs a cast.
        for (slot, _) in self.slots.iter().zip(&grads).filter(|(_, g)| g.is_some()) {
            slot.version.announce_change();
        }
        done
    }

    fn update(&mut self, grads: &[Option<Tensor>], seen: CastVeto) -> Result<StepReport> {
        let SgdConfig {
            lr,
            momentum,
            dampening,
            nesterov,
            weight_decay,
            max_grad_norm,
            seed,
            max_skipped_steps,
            ..
        } = self.config;
        let updated = grads.iter().flatten().count();
        self.sum.clear();
        for (slot, grad) in self.slots.iter().zip(grads) {
            self.sum.add(slot.var.elem_count(), grad.as_ref())?;
        }
        self.sum.add_marks(seen.marks()?)?;
        let grad_norm = self.sum.total()?.sqrt();
        self.sum.clear();
        if !grad_norm.is_finite() {
            self.streak.add();
            let vars = self.slots.iter();
            let vars = vars.map(|slot| (slot.name.as_str(), slot.var.as_tensor()));
            self.streak.check(max_skipped_steps, &seen, vars)?;
            return StepReport::left_out(lr, updated, grad_norm, self.step, seen);
        }
        self.streak.end();
        let clip = clip_coefficient(max_grad_norm, grad_norm);
        self.step += 1;
        for (i, (slot, grad)) in self.slots.iter_mut().zip(grads).enumerate() {
            let Some(grad) = grad else { continue };
            let (lr, weight_decay) = self.groups.rates(i, lr, weight_decay, slot.decays);
            let rates = Rates {
                lr,
                weight_decay,
                momentum,
                dampening,
                nesterov,
                clip,
            };
            let key = slot.kept.key(seed, self.step, i as u32);
            slot.update(grad, &rates, key).map_err(|error| {
                error.context(format!("optimizer step of variable `{}`", slot.name))
            })?;
        }
        Ok(StepReport::taken(lr, updated, grad_norm, clip))
    }

    /// The hyperparameters, with the learning rate of the next step.
    pub fn config(&self) -> &SgdConfig {
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

    /// Takes a valid configuration over; decay flags and master copies are the caller's concern.
    pub(super) fn put_config(&mut self, config: SgdConfig) {
        self.config = config;
        self.refused_lr = None;
    }

    /// Steps taken, skipped ones not counted.
    pub fn steps(&self) -> u64 {
        self.step
    }

    /// The variables with their names, in the order of the updates.
    pub fn vars(&self) -> impl Iterator<Item = (&str, &Var)> {
        let slots = self.slots.iter();
        slots.map(|slot| (slot.name.as_str(), &slot.var))
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.slots.iter().map(|slot| slot.name.as_str())
    }
}

impl std::fmt::Debug for Sgd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Sgd")
            .field("vars", &self.slots.len())
            .field("step", &self.step)
            .field("config", &self.config)
            .finish()
    }
}

/// candle-nn's interface. Variables get the names `000000`, `000001`, .. in the order given; prefer [`Sgd::from_named`] or
/// [`Sgd::from_varmap`] when the state is to be saved.
impl Optimizer for Sgd {
    type Config = SgdConfig;

    fn new(vars: Vec<Var>, config: SgdConfig) -> candle_core::Result<Self> {
        Ok(Self::from_named(numbered(vars), config)?)
    }

    /// As [`Sgd::apply`], without the report.
    fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
        self.apply(grads)?;
        Ok(())
    }

    fn learning_rate(&self) -> f64 {
        self.lr()
    }

    /// As [`Sgd::set_lr`]. This interface cannot refuse a rate, so the next step fails and changes nothing.
    fn set_learning_rate(&mut self, lr: f64) {
        if self.set_lr(lr).is_err() {
            self.refused_lr = Some(lr);
        }
    }
}
