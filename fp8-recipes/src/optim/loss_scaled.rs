//! An optimizer together with its loss scaler.

use candle_core::Tensor;
use candle_core::backprop::GradStore;

use super::error::Result;
use super::loss_scaled_step::LossScaledStep;
use super::loss_scaler::DynamicLossScaler;
use super::plain::NamedOptimizer;
use super::report::StepReport;
use super::state::{OptimizerState, ResumableOptimizer};

/// An optimizer with the loss scaler that drives it: `save_training` saves both, and `resume_training` restores both. A checkpoint without a
/// loss scaler loads too, and leaves the scaler as it is; the optimizer's part is the same with and without one.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Var};
/// use fp8::optim::{ResumableOptimizer, DynamicLossScaler, LossScaled, Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let make = || -> Result<_, fp8::optim::OptimError> {
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

impl DynamicLossScaler {
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
