//! The steps of an emulator: loss scaling and the optimizer.

use super::emulator::Emulator;
use crate::error::Result;
use crate::optim::{DynamicLossScaler, LossScaledStep, NamedOptimizer, StepReport};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

impl Emulator {
    /// How the loss is scaled now, and how many steps were left out.
    pub fn loss_scaler(&self) -> &DynamicLossScaler {
        &self.loss_scaler
    }

    /// The loss scaler, for example to load its state.
    pub fn loss_scaler_mut(&mut self) -> &mut DynamicLossScaler {
        &mut self.loss_scaler
    }

    /// The backward pass of the scaled loss, the division, the check of every gradient element, and the optimizer's step or none. Counts
    /// a step either way, and writes the statistics of one that was measured.
    ///
    /// # Errors
    /// The optimizer's or candle's; the count and the loss scale stay as they were.
    pub fn optimizer_step<O: NamedOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        loss: &Tensor,
    ) -> Result<LossScaledStep<StepReport>> {
        let step = self.loss_scaler.backward_step(loss, optimizer)?;
        self.end_step();
        Ok(step)
    }

    /// [`Emulator::optimizer_step`] from gradients that are there already: those of losses that
    /// [`DynamicLossScaler::scaled`] has scaled, such as their mean over micro-batches. `grads` are divided in place.
    ///
    /// # Errors
    /// As [`Emulator::optimizer_step`].
    pub fn optimizer_step_with_grads<O: NamedOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        grads: &mut GradStore,
    ) -> Result<LossScaledStep<StepReport>> {
        let step = self.loss_scaler.apply(grads, optimizer)?;
        self.end_step();
        Ok(step)
    }
}
