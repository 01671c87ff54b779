//! The steps of an emulator: loss scaling and the optimizer.

use super::Emulator;
use crate::error::Result;
use crate::optim::{DynamicLossScaler, NamedOptimizer, ScaledStep, StepReport};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

impl Emulator {
    /// How the loss is scaled now, and how many steps were left out.
    ///
    /// ```
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::nn;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// assert_eq!(emulator.loss_scaler().skipped_steps(), 0);
    /// # Ok(()) }
    /// ```
    pub fn loss_scaler(&self) -> &DynamicLossScaler {
        &self.loss_scaler
    }

    /// The loss scaler, for example to load its state.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::nn;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// let mut other = fp8::optim::DynamicLossScaler::default();
    /// other.update(true);
    /// emulator.loss_scaler_mut().load_state(&other.state())?;
    /// assert_eq!(emulator.loss_scaler().loss_scale(), 32768.);
    /// # Ok(()) }
    /// ```
    pub fn loss_scaler_mut(&mut self) -> &mut DynamicLossScaler {
        &mut self.loss_scaler
    }

    /// The backward pass of the scaled loss, the division, the check of every gradient element, and the optimizer's step or none. Counts
    /// a step either way, and writes the statistics of one that was measured.
    ///
    /// # Errors
    /// The optimizer's or candle's; the count and the loss scale stay as they were.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{DType, Device};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::nn;
    /// use fp8::optim::{Sgd, SgdConfig};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default())?;
    /// let loss = (model.weight()?.sum_all()? * f64::INFINITY)?;
    /// assert!(emulator.optimizer_step(&mut optimizer, &loss)?.skipped());
    /// assert_eq!((emulator.global_steps(), optimizer.steps()), (1, 0));
    /// # Ok(()) }
    /// ```
    pub fn optimizer_step<O: NamedOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        loss: &Tensor,
    ) -> Result<ScaledStep<StepReport>> {
        let step = self.loss_scaler.backward_step(loss, optimizer)?;
        self.end_step();
        Ok(step)
    }

    /// [`Emulator::optimizer_step`] from gradients that are there already: those of losses that
    /// [`DynamicLossScaler::scaled`] has scaled, such as their mean over micro-batches. `grads` are divided in place.
    ///
    /// # Errors
    /// As [`Emulator::optimizer_step`].
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// # use candle_core::{DType, Device, Module, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::emulation::{EmulationMethod, Emulator, EmulatorOptions};
    /// # use fp8_recipes::{nn, with_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vars = VarMap::new();
    /// # let model = nn::linear(32, 16, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
    /// # let mut emulator = Emulator::initialize(&model, EmulationMethod::Direct, EmulatorOptions::default())?;
    /// use fp8::GradAccumulator;
    /// use fp8::optim::{Sgd, SgdConfig};
    /// let mut optimizer = Sgd::from_varmap(&vars, SgdConfig::default())?;
    /// let mut micro_batches = GradAccumulator::new(&vars);
    /// for x in Tensor::full(0.1f32, (8, 32), &Device::Cpu)?.chunk(4, 0)? {
    ///     let loss = with_fp8(emulator.autocast(), || model.forward(&x))?.sqr()?.mean_all()?;
    ///     micro_batches.add(emulator.loss_scaler().scaled(&loss)?.backward()?)?;
    /// }
    /// let mut grads = micro_batches.finish_mean()?;
    /// let step = emulator.optimizer_step_with_grads(&mut optimizer, &mut grads)?;
    /// assert_eq!((step.skipped(), emulator.global_steps()), (false, 1));
    /// # Ok(()) }
    /// ```
    pub fn optimizer_step_with_grads<O: NamedOptimizer + ?Sized>(
        &mut self,
        optimizer: &mut O,
        grads: &mut GradStore,
    ) -> Result<ScaledStep<StepReport>> {
        let step = self.loss_scaler.apply(grads, optimizer)?;
        self.end_step();
        Ok(step)
    }
}
