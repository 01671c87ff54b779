//! Steps with a scaled loss: their reports, and an optimizer together with its loss scaler.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};
use fp8_candle::state::NonFinite;

use super::error::{OptimError, Result};
use super::loss_scaler::DynamicLossScaler;
use super::plain::NamedOptimizer;
use super::report::StepReport;
use super::state::{OptimizerState, ResumableOptimizer};
use super::veto::CastVeto;

/// The report of one step with a scaled loss.
///
/// ```
/// # use candle_core::{DType, Device, Var};
/// # use fp8_optim::{AdamW, AdamWConfig, DynamicLossScaler};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// # let mut optimizer = AdamW::from_named(vec![("w".into(), w.clone())], AdamWConfig::default())?;
/// # let mut scaler = DynamicLossScaler::default();
/// let step = scaler.backward_step(&w.sqr()?.sum_all()?, &mut optimizer)?;
/// assert_eq!(step.loss_scale(), 65536.);
/// if let Some(report) = step.report() {
///     assert!(report.grad_norm()? > 3.4);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct LossScaledStep<R> {
    loss_scale: f64,
    non_finite: usize,
    report: Option<R>,
    veto: CastVeto,
}

impl<R> LossScaledStep<R> {
    /// What the loss of this step was multiplied by.
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    /// Whether the step was skipped because of a non-finite gradient or cast.
    pub fn skipped(&self) -> bool {
        self.report.is_none()
    }

    /// How many variables had a gradient with an infinite or NaN element; at least 1 for a step that was skipped because a cast has seen
    /// Inf or NaN.
    pub fn non_finite(&self) -> usize {
        self.non_finite
    }

    /// Where casts of the step saw Inf or NaN, in the order of time, as [`StepReport::non_finite`]; empty for a step that was taken.
    ///
    /// # Errors
    /// candle's, when counts cannot be copied from the device.
    pub fn non_finite_casts(&self) -> Result<Vec<NonFinite>> {
        self.veto.casts()
    }

    /// As [`StepReport::first_non_finite`].
    ///
    /// # Errors
    /// As [`LossScaledStep::non_finite_casts`].
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        self.veto.first()
    }

    /// What the optimizer returned; None if the step was skipped.
    pub fn report(&self) -> Option<&R> {
        self.report.as_ref()
    }
}

impl DynamicLossScaler {
    /// A whole step with any optimizer: the backward pass of the scaled loss, the division and the check of the gradients, `take` with the
    /// gradients (or, if one is not finite, only a warning in `tracing`), and the update of the loss scale. `vars` are the variables that
    /// `take` changes; gradients of other variables stay scaled and are not checked.
    ///
    /// An error, also of `take`, leaves the loss scale as it is, except the error after too many skipped steps in a row
    /// ([`LossScalerConfig::max_skipped_steps`](super::LossScalerConfig::max_skipped_steps)).
    ///
    /// # Errors
    /// candle's, or what `take` returns.
    pub fn step<'a, R, E: From<OptimError>>(
        &mut self,
        loss: &Tensor,
        vars: impl IntoIterator<Item = &'a Var>,
        take: impl FnOnce(&GradStore) -> Result<R, E>,
    ) -> Result<LossScaledStep<R>, E> {
        self.step_with_grads(&mut self.backward(loss)?, vars, take)
    }

    fn backward(&self, loss: &Tensor) -> Result<GradStore> {
        Ok(fp8_candle::wide::backward(&self.scaled(loss)?)?)
    }

    /// [`DynamicLossScaler::step`] with existing gradients of [scaled](DynamicLossScaler::scaled) losses, such as their mean over
    /// micro-batches. `grads` are divided in place.
    ///
    /// # Errors
    /// candle's, or what `take` returns.
    pub fn step_with_grads<'a, R, E: From<OptimError>>(
        &mut self,
        grads: &mut GradStore,
        vars: impl IntoIterator<Item = &'a Var>,
        take: impl FnOnce(&GradStore) -> Result<R, E>,
    ) -> Result<LossScaledStep<R>, E> {
        let found = self.unscale_with_veto(grads, vars)?;
        self.step_unless(found, grads, take)
    }

    /// Takes the step unless something was `found`: gradients that are not finite, or what casts have seen.
    fn step_unless<R, E: From<OptimError>>(
        &mut self,
        (non_finite, veto): (usize, CastVeto),
        grads: &GradStore,
        take: impl FnOnce(&GradStore) -> Result<R, E>,
    ) -> Result<LossScaledStep<R>, E> {
        let loss_scale = self.loss_scale();
        let (report, veto) = match non_finite {
            0 => (Some(take(grads)?), CastVeto::default()),
            _ => (None, veto),
        };
        // Before the loss scale changes, since reading it may fail.
        let first = veto.first()?;
        self.update(non_finite > 0);
        if report.is_none() {
            self.check_skips(&veto)?;
            tracing::warn!(
                loss_scale,
                next_loss_scale = self.loss_scale(),
                non_finite,
                first_non_finite = first.as_deref(),
                "gradients are not finite: step skipped, the loss scale backs off"
            );
        }
        Ok(LossScaledStep {
            loss_scale,
            non_finite,
            report,
            veto,
        })
    }

    /// [`DynamicLossScaler::step`] with an optimizer of this library, or any other that knows its variables.
    ///
    /// # Errors
    /// candle's, or the optimizer's.
    pub fn backward_step<O: NamedOptimizer + ?Sized>(
        &mut self,
        loss: &Tensor,
        optimizer: &mut O,
    ) -> Result<LossScaledStep<StepReport>> {
        self.apply(&mut self.backward(loss)?, optimizer)
    }

    /// [`DynamicLossScaler::step_with_grads`] with an optimizer of this library, or any other that knows its variables.
    ///
    /// # Errors
    /// candle's, or the optimizer's.
    pub fn apply<O: NamedOptimizer + ?Sized>(
        &mut self,
        grads: &mut GradStore,
        optimizer: &mut O,
    ) -> Result<LossScaledStep<StepReport>> {
        let vars = optimizer.named_vars();
        let vars = vars.iter().map(|(_, var)| var);
        let (own, veto) = self.unscale_with_veto(grads, vars)?;
        let found = (optimizer.agreed_non_finite(own)?, veto);
        if found.0 > 0 {
            // Another rank may have found it; then nothing is noted here yet.
            optimizer.note_skipped()?;
        }
        self.step_unless(found, grads, |grads| optimizer.apply_gradients(grads))
    }

    /// The state of an optimizer together with that of this scaler, which drives it.
    ///
    /// # Errors
    /// The optimizer's.
    pub fn state_with<O: ResumableOptimizer + ?Sized>(
        &self,
        optimizer: &O,
    ) -> Result<OptimizerState> {
        let state = optimizer.optimizer_state()?;
        Ok(state.with_loss_scaler(self.state()))
    }

    /// Restores an optimizer and this scaler from a state of [`DynamicLossScaler::state_with`], or neither after an error. A state without
    /// a loss scaler leaves the scaler as it is.
    ///
    /// # Errors
    /// As [`DynamicLossScaler::load_state`], and the optimizer's.
    pub fn load_state_with<O: ResumableOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        state: &OptimizerState,
    ) -> Result<()> {
        if let Some(state) = state.loss_scaler() {
            self.check_state(state)?;
        }
        optimizer.load_optimizer_state(state)?;
        match state.loss_scaler() {
            Some(state) => self.load_state(state),
            None => Ok(()),
        }
    }
}

/// An optimizer with the loss scaler that drives it: `save_training` saves both, and `resume_training` restores both. A checkpoint without a
/// loss scaler loads too, and leaves the scaler as it is; the optimizer's part is the same with and without one.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fp8_optim::{ResumableOptimizer, DynamicLossScaler, LossScaled, Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let make = || -> Result<_, fp8_optim::OptimError> {
///     let sgd = Sgd::from_named(vec![("w".into(), w.clone())], SgdConfig::default())?;
///     Ok(LossScaled::new(sgd, DynamicLossScaler::default()))
/// };
/// let mut first = make()?;
/// let loss = (w.sqr()?.sum_all()? * f64::NAN)?;
/// assert!(first.backward_step(&loss)?.skipped());
/// let mut second = make()?;
/// second.load_optimizer_state(&first.optimizer_state()?)?;
/// assert_eq!(second.scaler.loss_scale(), 32768.);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct LossScaled<O> {
    /// Takes the steps.
    pub optimizer: O,
    /// Scales the loss.
    pub scaler: DynamicLossScaler,
}

impl<O> LossScaled<O> {
    /// The two together.
    pub fn new(optimizer: O, scaler: DynamicLossScaler) -> Self {
        Self { optimizer, scaler }
    }
}

impl<O: NamedOptimizer> LossScaled<O> {
    /// [`DynamicLossScaler::backward_step`]. For optimizers that do not know their variables there is [`DynamicLossScaler::step`].
    ///
    /// # Errors
    /// candle's, or the optimizer's.
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<LossScaledStep<StepReport>> {
        self.scaler.backward_step(loss, &mut self.optimizer)
    }

    /// [`DynamicLossScaler::apply`], for existing gradients of scaled losses.
    ///
    /// # Errors
    /// candle's, or the optimizer's.
    pub fn apply(&mut self, grads: &mut GradStore) -> Result<LossScaledStep<StepReport>> {
        self.scaler.apply(grads, &mut self.optimizer)
    }
}

impl<O: ResumableOptimizer> ResumableOptimizer for LossScaled<O> {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        self.scaler.state_with(&self.optimizer)
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        self.scaler.load_state_with(&mut self.optimizer, state)
    }

    fn announces_changes(&self) -> bool {
        self.optimizer.announces_changes()
    }

    fn scales_loss(&self) -> bool {
        true
    }
}
