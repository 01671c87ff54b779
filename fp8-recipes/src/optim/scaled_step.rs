//! Whole steps with a loss scaler, and what they did.

use candle_core::backprop::GradStore;
use candle_core::{Tensor, Var};

use super::error::Result;
use super::seen::Seen;
use super::{DynamicLossScaler, NamedOptimizer, OptimError, StepReport};
use crate::autocast::NonFinite;

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
    seen: Seen,
}

impl<R> ScaledStep<R> {
    /// What the loss of this step was multiplied by.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::{DynamicLossScaler, Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut sgd = Sgd::from_named(vec![("w".into(), w.clone())], SgdConfig::default().with_lr(0.25))?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let step = scaler.backward_step(&(w.sum_all()? * f64::NAN)?, &mut sgd)?;
    /// // What the step had, not what the next one has.
    /// assert_eq!((step.loss_scale(), scaler.loss_scale()), (65536., 32768.));
    /// # Ok(()) }
    /// ```
    pub fn loss_scale(&self) -> f64 {
        self.loss_scale
    }

    /// Whether the step was left out, because of a non-finite gradient.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::{DynamicLossScaler, Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut sgd = Sgd::from_named(vec![("w".into(), w.clone())], SgdConfig::default().with_lr(0.25))?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let loss = w.sum_all()?;
    /// assert!(!scaler.backward_step(&loss, &mut sgd)?.skipped());
    /// assert!(scaler.backward_step(&(loss * f64::INFINITY)?, &mut sgd)?.skipped());
    /// # Ok(()) }
    /// ```
    pub fn skipped(&self) -> bool {
        self.report.is_none()
    }

    /// How many variables had a gradient with an infinite or NaN element; at least 1 for a step that was left out because a cast has
    /// seen Inf or NaN.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::DynamicLossScaler;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let v = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// let loss = (w.sum_all()? + (v.sum_all()? * f64::INFINITY)?)?;
    /// let step = scaler.step(&loss, [&v, &w], |_| Ok::<_, candle_core::Error>(()))?;
    /// assert_eq!(step.non_finite(), 1);
    /// # Ok(()) }
    /// ```
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
        self.seen.culprit()
    }

    /// What the optimizer returned; None if it was not asked.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::DynamicLossScaler;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let loss = w.sum_all()?;
    /// let step = scaler.step(&loss, [&w], |_| Ok::<_, candle_core::Error>("taken"))?;
    /// assert_eq!(step.report(), Some(&"taken"));
    /// let step = scaler.step(&(loss * f64::NAN)?, [&w], |_| Ok::<_, candle_core::Error>("taken"))?;
    /// assert_eq!(step.report(), None);
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::DynamicLossScaler;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let sign_descent = |grads: &candle_core::backprop::GradStore| match grads.get(&w) {
    ///     Some(grad) => w.set(&(w.as_tensor() - (grad.sign()? * 0.25)?)?),
    ///     None => Ok(()),
    /// };
    /// scaler.step(&w.sqr()?.sum_all()?, [&w], sign_descent)?;
    /// assert_eq!(w.to_vec1::<f32>()?, [0.75; 3]);
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::DynamicLossScaler;
    /// use candle_nn::{Optimizer, SGD};
    /// use fp8::GradAccumulator;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let mut sgd = SGD::new(vec![w.clone()], 0.25)?;
    /// let mut micro_batches = GradAccumulator::from_vars(vec![w.clone()]);
    /// for factor in [1., 3.] {
    ///     let loss = (w.sum_all()? * factor)?;
    ///     micro_batches.add(scaler.scaled(&loss)?.backward()?)?;
    /// }
    /// let mut grads = micro_batches.finish_mean()?;
    /// let step = scaler.step_with_grads(&mut grads, [&w], |grads| sgd.step(grads))?;
    /// assert!(!step.skipped());
    /// assert_eq!(w.to_vec1::<f32>()?, [0.5; 3]);
    /// # Ok(()) }
    /// ```
    pub fn step_with_grads<'a, R, E: From<OptimError>>(
        &mut self,
        grads: &mut GradStore,
        vars: impl IntoIterator<Item = &'a Var>,
        take: impl FnOnce(&GradStore) -> Result<R, E>,
    ) -> Result<ScaledStep<R>, E> {
        let (non_finite, seen) = self.unscale_seen(grads, vars)?;
        let loss_scale = self.loss_scale();
        let (report, seen) = match non_finite {
            0 => (Some(take(grads)?), Seen::default()),
            _ => (None, seen),
        };
        self.update(non_finite > 0);
        if report.is_none() {
            self.check_skips(&seen)?;
            let first = seen.culprit()?;
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
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::{DynamicLossScaler, Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut sgd = Sgd::from_named(vec![("w".into(), w.clone())], SgdConfig::default().with_lr(0.25))?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let step = scaler.backward_step(&w.sqr()?.sum_all()?, &mut sgd)?;
    /// assert!(!step.skipped());
    /// assert_eq!(w.to_vec1::<f32>()?, [0.5; 3]);
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::{DynamicLossScaler, Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut sgd = Sgd::from_named(vec![("w".into(), w.clone())], SgdConfig::default().with_lr(0.25))?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let mut grads = scaler.scaled(&w.sqr()?.sum_all()?)?.backward()?;
    /// assert!(!scaler.apply(&mut grads, &mut sgd)?.skipped());
    /// assert_eq!(w.to_vec1::<f32>()?, [0.5; 3]);
    /// # Ok(()) }
    /// ```
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
