//! Whole steps with a loss scaler, and what they did.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use super::error::Result;
use super::veto::CastVeto;
use super::{DynamicLossScaler, NamedOptimizer, OptimError, StepReport};
use fp8_candle::state::NonFinite;

/// What one step with a scaled loss did.
///
/// ```
/// # use candle_core::{DType, Device, Var};
/// # use fp8_recipes::optim::{AdamW, AdamWConfig, DynamicLossScaler};
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
pub struct ScaledStep<R> {
    loss_scale: f64,
    non_finite: usize,
    report: Option<R>,
    seen: CastVeto,
}

impl<R> ScaledStep<R> {
    /// What the loss of this step was multiplied by.
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    /// Whether the step was left out, because of a non-finite gradient.
    pub fn skipped(&self) -> bool {
        self.report.is_none()
    }

    /// How many variables had a gradient with an infinite or NaN element; at least 1 for a step that was left out because a cast has
    /// seen Inf or NaN.
    pub fn non_finite(&self) -> usize {
        self.non_finite
    }

    /// Where casts of the step saw Inf or NaN, the first one in time first, in the models with a variable of the optimizer; empty for a
    /// step that was taken. [`StepReport::non_finite`] of a step with a loss scaler.
    ///
    /// # Errors
    /// candle's, when counts cannot be copied from the device.
    pub fn non_finite_casts(&self) -> Result<Vec<NonFinite>> {
        self.seen.casts()
    }

    /// As [`StepReport::first_non_finite`].
    ///
    /// # Errors
    /// As [`ScaledStep::non_finite_casts`].
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        self.seen.first()
    }

    /// What the optimizer returned; None if it was not asked.
    pub fn report(&self) -> Option<&R> {
        self.report.as_ref()
    }
}

impl DynamicLossScaler {
    /// A whole step with any optimizer: the backward pass of the scaled loss, the division, the check, then `take` with the
    /// gradients or, if one is not finite, nothing but a warning in `tracing`; last the update of the loss scale. `vars` are the variables
    /// that `take` changes: those that are not among them keep scaled gradients that nobody has looked at.
    ///
    /// An error, also of `take`, leaves the loss scale as it is, but for the one of too many steps left out in a row
    /// ([`LossScalerConfig::max_skipped_steps`](super::LossScalerConfig::max_skipped_steps)).
    ///
    /// # Errors
    /// candle's, or what `take` returns.
    pub fn step<'a, R, E: From<OptimError>>(
        &mut self,
        loss: &Tensor,
        vars: impl IntoIterator<Item = &'a Var>,
        take: impl FnOnce(&GradStore) -> Result<R, E>,
    ) -> Result<ScaledStep<R>, E> {
        let mut grads =
            fp8_candle::wide::backward(&self.scaled(loss)?).map_err(OptimError::from)?;
        self.step_with_grads(&mut grads, vars, take)
    }

    /// [`DynamicLossScaler::step`] from gradients of [scaled](DynamicLossScaler::scaled) losses that are there already, such as
    /// the mean over micro-batches. `grads` are divided in place.
    ///
    /// # Errors
    /// candle's, or what `take` returns.
    pub fn step_with_grads<'a, R, E: From<OptimError>>(
        &mut self,
        grads: &mut GradStore,
        vars: impl IntoIterator<Item = &'a Var>,
        take: impl FnOnce(&GradStore) -> Result<R, E>,
    ) -> Result<ScaledStep<R>, E> {
        let (non_finite, seen) = self.unscale_seen(grads, vars)?;
        let loss_scale = self.loss_scale();
        let (report, seen) = match non_finite {
            0 => (Some(take(grads)?), CastVeto::default()),
            _ => (None, seen),
        };
        self.update(non_finite > 0);
        if report.is_none() {
            self.check_skips(&seen)?;
            let first = seen.first()?;
            tracing::warn!(
                loss_scale,
                next_loss_scale = self.loss_scale(),
                non_finite,
                first_non_finite = first.as_deref(),
                "gradients are not finite: step skipped, the loss scale backs off"
            );
        }
        Ok(ScaledStep {
            loss_scale,
            non_finite,
            report,
            seen,
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
    ) -> Result<ScaledStep<StepReport>> {
        let vars = optimizer.named_vars();
        let vars = vars.iter().map(|(_, var)| var);
        self.step(loss, vars, |grads| optimizer.apply_gradients(grads))
    }

    /// [`DynamicLossScaler::step_with_grads`] with an optimizer of this library, or any other that knows its variables.
    ///
    /// # Errors
    /// candle's, or the optimizer's.
    pub fn apply<O: NamedOptimizer + ?Sized>(
        &mut self,
        grads: &mut GradStore,
        optimizer: &mut O,
    ) -> Result<ScaledStep<StepReport>> {
        let vars = optimizer.named_vars();
        let vars = vars.iter().map(|(_, var)| var);
        self.step_with_grads(grads, vars, |grads| optimizer.apply_gradients(grads))
    }
}
