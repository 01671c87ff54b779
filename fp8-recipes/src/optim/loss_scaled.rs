//! An optimizer together with its loss scaler.

use candle_core::Tensor;

use super::error::Result;
use super::{
    CheckpointOptimizer, DynamicLossScaler, NamedOptimizer, OptimizerState, ScaledStep, StepReport,
};

/// An optimizer with the loss scaler that drives it: [`save_training`](crate::checkpoint::save_training) and
/// [`resume_training`](crate::checkpoint::resume_training) save both and bring both back. A checkpoint without a loss scaler loads too,
/// and leaves the scaler as it is; the optimizer's part is the same with and without one.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use fp8_recipes::optim::{CheckpointOptimizer, DynamicLossScaler, LossScaled, Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// let make = || -> Result<_, fp8_recipes::optim::OptimError> {
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
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::{DynamicLossScaler, LossScaled, Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut sgd = Sgd::from_named(vec![("w".into(), w.clone())], SgdConfig::default().with_lr(0.25))?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let scaled = LossScaled::new(sgd, scaler);
    /// assert_eq!((scaled.optimizer.lr(), scaled.scaler.loss_scale()), (0.25, 65536.));
    /// # Ok(()) }
    /// ```
    pub fn new(optimizer: O, scaler: DynamicLossScaler) -> Self {
        Self { optimizer, scaler }
    }
}

impl<O: NamedOptimizer> LossScaled<O> {
    /// [`DynamicLossScaler::backward_step`]. For optimizers that do not know their variables there is [`DynamicLossScaler::step`].
    ///
    /// # Errors
    /// candle's, or the optimizer's.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Var};
    /// # use fp8_recipes::optim::{DynamicLossScaler, LossScaled, Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let w = Var::ones(3, DType::F32, &Device::Cpu)?;
    /// # let mut sgd = Sgd::from_named(vec![("w".into(), w.clone())], SgdConfig::default().with_lr(0.25))?;
    /// # let mut scaler = DynamicLossScaler::default();
    /// let mut scaled = LossScaled::new(sgd, scaler);
    /// let step = scaled.backward_step(&w.sqr()?.sum_all()?)?;
    /// assert_eq!((step.skipped(), scaled.optimizer.steps()), (false, 1));
    /// # Ok(()) }
    /// ```
    pub fn backward_step(&mut self, loss: &Tensor) -> Result<ScaledStep<StepReport>> {
        self.scaler.backward_step(loss, &mut self.optimizer)
    }
}

impl<O: CheckpointOptimizer> CheckpointOptimizer for LossScaled<O> {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        let state = self.optimizer.optimizer_state()?;
        Ok(state.with_loss_scaler(self.scaler.state()))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        if let Some(scaler) = state.loss_scaler() {
            self.scaler.check_state(scaler)?;
        }
        self.optimizer.load_optimizer_state(state)?;
        match state.loss_scaler() {
            Some(scaler) => self.scaler.load_state(scaler),
            None => Ok(()),
        }
    }

    fn announces_changes(&self) -> bool {
        self.optimizer.announces_changes()
    }

    fn scales_loss(&self) -> bool {
        true
    }
}
