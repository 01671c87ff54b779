//! The engine of all optimizers: parameters, groups, the order of a step, and settings.

use std::collections::HashSet;

use candle_core::Tensor;

use super::counter::Counter;
use super::error::{OptimError, Result};
use super::groups::{Groups, ParamGroup};
use super::memory::address;
use super::norm::clip_coefficient;
use super::parameter::Parameter;
use super::report::StepReport;
use super::rule::{MAX_MOMENTS, Rates, Rule};
use super::settings::check_lr;
use super::shared::Shared;
use super::veto::{CastVeto, JudgedCasts, SkipStreak};

/// An optimizer: the formula of `R` over parameters that are stored as `P`. Its names are [`AdamW`](super::AdamW) and
/// [`Sgd`](super::Sgd) for variables, [`ScaledAdamW`](super::scaled::ScaledAdamW) and [`ScaledSgd`](super::scaled::ScaledSgd) for
/// scaled parameters.
///
/// - Parameters are ordered by name, whatever order they were given in, so sums over them have one order.
/// - [`Engine::with_groups`] gives some parameters a learning rate and weight decay of their own.
/// - A parameter without a gradient does not change, and neither do its moments; the step counter is shared by all, as in candle-nn.
/// - A step whose gradient norm is not finite changes nothing, the step counter included; nor does a step in which a cast of the model
///   has seen Inf or NaN, which a saturating cast makes finite. After [`Settings::max_skipped_steps`](super::Settings) skipped steps in a
///   row, the step is an error.
/// - Results do not depend on the number of threads. On CUDA devices they are those of the CPU to the bit (the sign of a zero in f64
///   aside), the norm included.
/// - Moments of variables are f32 (f64 for f64 variables), also for bf16 and f16 variables, which are updated in f32 and rounded to nearest
///   once; or FP8: [`MomentStorage`](super::MomentStorage). Master weights keep what that rounding loses: [`MasterDType`](super::MasterDType).
/// - A second moment beyond the range of f32, of gradients from 2e19 on, is the largest number of f32 and falls from there.
pub struct Engine<R: Rule, P: Parameter<R>> {
    pub(super) slots: Vec<Slot<P>>,
    pub(super) rule: R,
    pub(super) counter: Counter,
    pub(super) groups: Groups,
    pub(super) shared: Shared,
    pub(super) streak: SkipStreak,
    pub(super) judged: JudgedCasts,
    /// An invalid learning rate, set through candle's interface, which cannot return an error.
    pub(super) invalid_lr: Option<f64>,
    /// Whether a step has begun to update parameters and has not come to its end.
    pub(super) unfinished: bool,
}

/// A parameter in its engine.
pub(super) struct Slot<P> {
    pub(super) parameter: P,
    pub(super) decays: bool,
}

/// Whether a step is taken.
pub(super) enum Decision {
    /// The number of the step, and the factor by which gradients are clipped.
    Take {
        step: u64,
        clip: f64,
    },
    Skip(StepReport),
}

impl<R: Rule, P: Parameter<R>> Engine<R, P> {
    /// The engine of these parameters, sorted by name.
    pub(super) fn with_parameters(
        parameters: Vec<P>,
        rule: R,
        counter: Counter,
        shared: Shared,
    ) -> Self {
        const { assert!(R::MOMENTS.len() <= MAX_MOMENTS) }
        let scope = rule.settings().decay_scope;
        let slots = parameters.into_iter().map(|parameter| Slot {
            decays: scope.includes(parameter.whole().rank()),
            parameter,
        });
        Self {
            slots: slots.collect(),
            rule,
            counter,
            groups: Groups::default(),
            shared,
            streak: SkipStreak::default(),
            judged: JudgedCasts::default(),
            invalid_lr: None,
            unfinished: false,
        }
    }

    /// Gives parameters hyperparameters of their own; replaces earlier groups.
    ///
    /// # Errors
    /// [`NoSuchVariable`](super::OptimError::NoSuchVariable) for a pattern that matches no name, and
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter).
    pub fn with_groups(mut self, groups: Vec<ParamGroup>) -> Result<Self> {
        self.groups = Groups::new(groups, self.names())?;
        self.shared.forget_kernels();
        Ok(self)
    }

    /// The groups, in the order given.
    pub fn groups(&self) -> &[ParamGroup] {
        self.groups.all()
    }

    /// Excludes the parameters for which `no_decay(name, tensor)` is true from weight decay, unless their group has a weight decay; all
    /// others decay. Replaces the choice of the configuration's decay scope.
    pub fn with_no_decay(mut self, no_decay: impl Fn(&str, &Tensor) -> bool) -> Self {
        for slot in &mut self.slots {
            slot.decays = !no_decay(slot.parameter.name(), slot.parameter.whole());
        }
        self.shared.forget_kernels();
        self
    }

    /// The hyperparameters, with the learning rate of the next step.
    pub fn config(&self) -> &R {
        &self.rule
    }

    /// The learning rate of the next step.
    pub fn lr(&self) -> f64 {
        self.rule.settings().lr
    }

    /// Sets the learning rate of the next step, usually [`LrSchedule::lr`](super::LrSchedule::lr).
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) if `lr` is NaN, infinite or negative; the old one stays.
    pub fn set_lr(&mut self, lr: f64) -> Result<()> {
        check_lr(lr)?;
        self.rule.set_lr(lr);
        self.invalid_lr = None;
        Ok(())
    }

    /// Replaces the configuration by a valid one; the caller updates decay flags and master copies.
    pub(super) fn put_config(&mut self, rule: R) {
        self.rule = rule;
        self.invalid_lr = None;
        self.shared.forget_kernels();
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &str> + Clone {
        self.slots.iter().map(|slot| slot.parameter.name())
    }

    /// The checked gradients, in the order of the parameters.
    pub(super) fn gradients(&self, grads: &P::Grads) -> Result<Vec<Option<P::Grad>>> {
        self.invalid_lr.map_or(Ok(()), check_lr)?;
        if self.unfinished {
            return Err(OptimError::UnfinishedStep);
        }
        let parameters = self.slots.iter().map(|slot| &slot.parameter);
        let own: HashSet<usize> = parameters.clone().map(|p| address(p.tensor())).collect();
        parameters.map(|p| p.gradient(grads, &own)).collect()
    }

    /// Fails once too many steps in a row were skipped.
    pub(super) fn check_streak(&self, veto: &CastVeto) -> Result<()> {
        let parameters = self.slots.iter().map(|slot| &slot.parameter);
        let tensors = parameters.map(|p| (p.name(), p.tensor()));
        let limit = self.rule.settings().max_skipped_steps;
        self.streak.check(limit, veto, tensors)
    }

    /// Takes the step or skips it, by the norm of the gradients, of which there are `updated`.
    pub(super) fn decide(
        &mut self,
        grad_norm: f64,
        updated: usize,
        veto: CastVeto,
    ) -> Result<Decision> {
        let step = self.counter.get()?;
        if !grad_norm.is_finite() {
            self.streak.add();
            self.check_streak(&veto)?;
            let first = veto.first()?;
            let report = StepReport::skipped_by(self.lr(), updated, grad_norm, step, (veto, first));
            return Ok(Decision::Skip(report));
        }
        self.streak.end();
        self.unfinished = true;
        self.counter.set(step + 1)?;
        let clip = clip_coefficient(self.rule.settings().max_grad_norm, grad_norm);
        let step = step + 1;
        Ok(Decision::Take { step, clip })
    }

    /// The report of a step that was taken to its end.
    pub(super) fn taken(&mut self, updated: usize, grad_norm: f64, clip: f64) -> StepReport {
        self.unfinished = false;
        StepReport::taken(self.lr(), updated, grad_norm, clip)
    }

    /// Updates every parameter that has a gradient and for which `includes(index)` holds, in step number `step`.
    pub(super) fn update_each(
        &mut self,
        grads: &[Option<P::Grad>],
        step: u64,
        clip: f64,
        includes: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let settings = self.rule.settings();
        for (index, (slot, grad)) in self.slots.iter_mut().zip(grads).enumerate() {
            let Some(grad) = grad.as_ref().filter(|_| includes(index)) else {
                continue;
            };
            let (lr, weight_decay) =
                (self.groups).rates(index, settings.lr, settings.weight_decay, slot.decays);
            let rates = Rates {
                lr,
                weight_decay,
                clip,
                step,
                index,
                begins: false,
            };
            let done = (slot.parameter).update(&self.rule, grad, &rates, &mut self.shared);
            done.map_err(|error| {
                let name = slot.parameter.name();
                error.context(format!("optimizer step of variable `{name}`"))
            })?;
        }
        Ok(())
    }
}

impl<R: Rule, P: Parameter<R>> std::fmt::Debug for Engine<R, P> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = P::KIND.rsplit('.').next().unwrap_or(P::KIND);
        f.debug_struct(name)
            .field("vars", &self.slots.len())
            .field("step", &self.counter)
            .field("config", &self.rule)
            .finish()
    }
}
