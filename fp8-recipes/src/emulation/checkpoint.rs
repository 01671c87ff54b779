//! An emulator in a training checkpoint.

use super::emulator::Emulator;
use crate::optim::{OptimError, OptimizerState, ResumableOptimizer};

/// An optimizer together with the emulator that drives it, for
/// [`save_training`](crate::checkpoint::save_training) and [`resume_training`](crate::checkpoint::resume_training):
/// [`Emulator::with_optimizer`]. The optimizer's part of the checkpoint is the same without an emulator, so either loads a
/// checkpoint of the other; what that checkpoint lacks stays unchanged.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
/// # use fp8_recipes::nn;
/// use fp8::optim::{ResumableOptimizer, Sgd, SgdConfig};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vars = VarMap::new();
/// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
/// let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default())?;
/// let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
/// emulator.update_global_steps(7);
/// let state = emulator.with_optimizer(&mut optimizer).optimizer_state()?;
/// assert_eq!(state.global_steps(), Some(7));
/// assert_eq!(state.loss_scaler().map(|scaler| scaler.loss_scale), Some(65536.));
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct EmulatedOptimizer<'a, O: ?Sized> {
    emulator: &'a mut Emulator,
    optimizer: &'a mut O,
}

impl Emulator {
    /// The optimizer together with the loss scaler and the step count of this emulator, for a training checkpoint.
    pub fn with_optimizer<'a, O: ?Sized>(
        &'a mut self,
        optimizer: &'a mut O,
    ) -> EmulatedOptimizer<'a, O> {
        EmulatedOptimizer {
            emulator: self,
            optimizer,
        }
    }
}

impl<O: ResumableOptimizer + ?Sized> ResumableOptimizer for EmulatedOptimizer<'_, O> {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
        let state = self.emulator.loss_scaler.state_with(self.optimizer)?;
        Ok(state.with_global_steps(self.emulator.global_steps))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        let scaler = &mut self.emulator.loss_scaler;
        scaler.load_state_with(self.optimizer, state)?;
        if let Some(steps) = state.global_steps() {
            self.emulator.global_steps = steps;
        }
        Ok(())
    }

    fn announces_changes(&self) -> bool {
        self.optimizer.announces_changes()
    }

    fn scales_loss(&self) -> bool {
        true
    }
}
