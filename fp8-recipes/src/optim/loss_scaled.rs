//! An optimizer together with its loss scaler.

use candle_core::Tensor;
use candle_core::backprop::GradStore;

use super::error::Result;
use super::{
    CheckpointOptimizer, DynamicLossScaler, NamedOptimizer, OptimizerState, ScaledStep, StepReport,
};

/// An optimizer with the loss scaler that drives it: [`save_training`](crate::checkpoint::save_training) and
/// [`resume_training`](crate::checkpoint::resume_training) save both and bring both back. A checkpoint without a loss scaler loads too,
/// and leaves the scaler as it is; the optimizer's part is the same with and without one.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Var};
/// use fp8::optim::{CheckpointOptimizer, DynamicLossScaler, LossScaled, Sgd, SgdConfig};
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
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<ScaledStep<StepReport>> {
        self.scaler.backward_step(loss, &mut self.optimizer)
    }

    /// [`DynamicLossScaler::apply`], for gradients of scaled losses that are there already.
    ///
    /// # Errors
    /// candle's, or the optimizer's.
    pub fn apply(&mut self, grads: &mut GradStore) -> Result<ScaledStep<StepReport>> {
        self.scaler.apply(grads, &mut self.optimizer)
    }
}

/// The state of an optimizer with that of its loss scaler.
pub(crate) fn scaled_state<O: CheckpointOptimizer + ?Sized>(
    optimizer: &O,
    scaler: &DynamicLossScaler,
) -> Result<OptimizerState> {
    let state = optimizer.optimizer_state()?;
    Ok(state.with_loss_scaler(scaler.state()))
}

/// Brings both back, or neither.
pub(crate) fn load_scaled_state<O: CheckpointOptimizer + ?Sized>(
    optimizer: &mut O,
    scaler: &mut DynamicLossScaler,
    state: &OptimizerState,
) -> Result<()> {
    if let Some(state) = state.loss_scaler() {
        scaler.check_state(state)?;
    }
    optimizer.load_optimizer_state(state)?;
    match state.loss_scaler() {
        Some(state) => scaler.load_state(state),
        None => Ok(()),
    }
}

impl<O: CheckpointOptimizer> CheckpointOptimizer for LossScaled<O> {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        scaled_state(&self.optimizer, &self.scaler)
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        load_scaled_state(&mut self.optimizer, &mut self.scaler, state)
    }

    fn announces_changes(&self) -> bool {
        self.optimizer.announces_changes()
    }

    fn scales_loss(&self) -> bool {
        true
    }
}
