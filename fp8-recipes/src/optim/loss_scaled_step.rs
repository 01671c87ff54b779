//! Whole steps with a loss scaler, and their reports.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use super::error::{OptimError, Result};
use super::loss_scaler::DynamicLossScaler;
use super::plain::NamedOptimizer;
use super::report::StepReport;
use super::veto::CastVeto;
use fp8_candle::state::NonFinite;

/// The report of one step with a scaled loss.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Var};
/// # use fp8::optim::{AdamW, AdamWConfig, DynamicLossScaler};
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
        let mut grads =
            fp8_candle::wide::backward(&self.scaled(loss)?).map_err(OptimError::from)?;
        self.step_with_grads(&mut grads, vars, take)
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
        let (non_finite, veto) = self.unscale_with_veto(grads, vars)?;
        let loss_scale = self.loss_scale();
        let (report, veto) = match non_finite {
            0 => (Some(take(grads)?), CastVeto::default()),
            _ => (None, veto),
        };
        self.update(non_finite > 0);
        if report.is_none() {
            self.check_skips(&veto)?;
            let first = veto.first()?;
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
    ) -> Result<LossScaledStep<StepReport>> {
        let vars = optimizer.named_vars();
        let vars = vars.iter().map(|(_, var)| var);
        self.step_with_grads(grads, vars, |grads| optimizer.apply_gradients(grads))
    }
}
