//! The state of an optimizer in a training checkpoint.

use std::collections::HashMap;

use candle_core::{DType, Shape, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::{OptimError, Result};
use super::loss_scaler::LossScalerState;
use super::state_reader::{StateReader, find};

/// The name of the step counter in a state: i64, shape `[]`. No other tensor can have it, since the names of all others contain a dot.
pub const STEP_NAME: &str = "step";

/// An optimizer that a training checkpoint can save and resume: `save_training` and `resume_training` take any.
///
/// | optimizer | what is restored |
/// |---|---|
/// | [`AdamW`](super::AdamW), [`Sgd`](super::Sgd) and those of scaled parameters | everything: moments, master weights, step, hyperparameters |
/// | [`LossScaled`](super::LossScaled) | what is restored of the optimizer in it, and the loss scaler |
/// | `EmulatedOptimizer` | what is restored of the optimizer, the loss scaler and the count of steps |
/// | `candle_nn::SGD` | everything: its learning rate |
/// | `candle_nn::AdamW` | its hyperparameters; moments and step are private and start from zero |
/// | [`NoOptimizer`] | nothing; for programs that save without an optimizer |
///
/// The checkpoint saves the variables themselves. An optimizer of your own is best written as a [`Rule`](super::Rule);
/// [`ScaledOptimizer`](super::scaled::ScaledOptimizer) has an example that implements this trait.
pub trait ResumableOptimizer {
    /// Everything except the variables that later steps depend on. Later steps must not change its tensors.
    ///
    /// # Errors
    /// If a tensor cannot be made or copied from its device.
    fn optimizer_state(&self) -> Result<OptimizerState>;

    /// Restores a state made by [`ResumableOptimizer::optimizer_state`], on whatever devices its tensors are: all of it, or nothing if there
    /// is an error. An implementation checks everything before it changes anything.
    ///
    /// # Errors
    /// [`OptimError::StateKind`] for the state of another optimizer, and whatever else does not fit.
    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()>;

    /// Whether every step announces the weights that it changes ([`weight_version`](fp8_candle::weight_version)). Only then does a GPU keep
    /// FP8 copies of weights between steps; an optimizer that returns true without announcing would leave stale copies in use. The default is
    /// false.
    fn announces_changes(&self) -> bool {
        false
    }

    /// Whether [`ResumableOptimizer::load_optimizer_state`] restores a loss scaler. If not, resuming from a checkpoint with a loss scaler
    /// warns. The default is false.
    fn scales_loss(&self) -> bool {
        false
    }
}

/// The state of an optimizer: which one it is, named tensors, and hyperparameters as JSON.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_optim::{OptimError, OptimizerState};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let state = OptimizerState::new("my_crate.Sign")
///     .with_hyperparameters(0.01f64)?
///     .with_tensor("w.sign", Tensor::ones(3, DType::F32, &Device::Cpu)?);
/// state.check_kind("my_crate.Sign")?;
/// assert_eq!(state.hyperparameters::<f64>()?, Some(0.01));
/// assert_eq!(state.tensor("w.sign", DType::F32, &3.into())?.dims(), [3]);
/// let missing = state.tensor("b.sign", DType::F32, &3.into());
/// assert!(matches!(missing, Err(OptimError::MissingState { name }) if name == "b.sign"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct OptimizerState {
    kind: String,
    hyperparameters: Value,
    tensors: HashMap<String, Tensor>,
    loss_scaler: Option<LossScalerState>,
    global_steps: Option<u64>,
}

impl OptimizerState {
    /// A state without tensors and hyperparameters. `kind` names the optimizer, and the version if its state changes from version to
    /// version: only a state of the same kind can be loaded. Put your crate's name before it.
    pub fn new(kind: impl Into<String>) -> Self {
        Self {
            kind: kind.into(),
            hyperparameters: Value::Null,
            tensors: HashMap::new(),
            loss_scaler: None,
            global_steps: None,
        }
    }

    /// Adds the state of the loss scaler that drives the optimizer.
    pub fn with_loss_scaler(mut self, state: LossScalerState) -> Self {
        self.loss_scaler = Some(state);
        self
    }

    /// The state of the loss scaler, if one drives the optimizer.
    pub fn loss_scaler(&self) -> Option<&LossScalerState> {
        self.loss_scaler.as_ref()
    }

    /// Adds the count of all steps, including skipped ones, of the `Emulator` that drives the optimizer.
    pub fn with_global_steps(mut self, steps: u64) -> Self {
        self.global_steps = Some(steps);
        self
    }

    /// The count of [`OptimizerState::with_global_steps`], if there is one.
    pub fn global_steps(&self) -> Option<u64> {
        self.global_steps
    }

    /// Adds a tensor, or replaces the one of this name.
    pub fn with_tensor(mut self, name: impl Into<String>, tensor: Tensor) -> Self {
        self.tensors.insert(name.into(), tensor);
        self
    }

    /// Adds tensors by name.
    pub fn with_tensors(mut self, tensors: impl IntoIterator<Item = (String, Tensor)>) -> Self {
        self.tensors.extend(tensors);
        self
    }

    /// Replaces the hyperparameters.
    ///
    /// # Errors
    /// [`OptimError::StateHyperparameters`] if JSON cannot hold them.
    pub fn with_hyperparameters(mut self, hyperparameters: impl Serialize) -> Result<Self> {
        let value = serde_json::to_value(hyperparameters);
        self.hyperparameters = value.map_err(|error| self.hyperparameters_error(error))?;
        Ok(self)
    }

    /// The optimizer's name.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// All tensors by name.
    pub fn tensors(&self) -> &HashMap<String, Tensor> {
        &self.tensors
    }

    /// The hyperparameters as JSON, null if there are none.
    pub fn hyperparameters_json(&self) -> &Value {
        &self.hyperparameters
    }

    /// The hyperparameters; None if the optimizer keeps its own, as `ResumeOptions::keep_hyperparameters` asks.
    ///
    /// # Errors
    /// [`OptimError::StateHyperparameters`] if they do not fit `T`.
    pub fn hyperparameters<T: DeserializeOwned>(&self) -> Result<Option<T>> {
        match &self.hyperparameters {
            Value::Null => Ok(None),
            value => T::deserialize(value)
                .map(Some)
                .map_err(|error| self.hyperparameters_error(error)),
        }
    }

    /// The tensor of this name.
    ///
    /// # Errors
    /// [`OptimError::MissingState`], [`OptimError::StateShape`] or [`OptimError::StateDtype`].
    pub fn tensor(&self, name: &str, dtype: DType, shape: &Shape) -> Result<&Tensor> {
        find(&self.tensors, name, dtype, shape)
    }

    /// Fails unless this is the state of the optimizer `expected`.
    ///
    /// # Errors
    /// [`OptimError::StateKind`].
    pub fn check_kind(&self, expected: &str) -> Result<()> {
        if self.kind == expected {
            return Ok(());
        }
        Err(OptimError::StateKind {
            expected: expected.to_string(),
            got: self.kind.clone(),
        })
    }

    /// Fails if there is a tensor of any other name than these.
    ///
    /// # Errors
    /// [`OptimError::UnexpectedState`] with the first such name.
    pub fn check_names(&self, known: impl IntoIterator<Item = impl Into<String>>) -> Result<()> {
        let mut reader = StateReader::new(&self.tensors);
        for name in known {
            reader.know(&name.into());
        }
        reader.finish()
    }

    fn hyperparameters_error(&self, error: serde_json::Error) -> OptimError {
        OptimError::StateHyperparameters {
            kind: self.kind.clone(),
            reason: error.to_string(),
        }
    }
}

/// The optimizer of a program that has no optimizer to save, for `save_training` and `resume_training`. It refuses the checkpoint of an
/// optimizer, unless `ResumeOptions::fresh_optimizer` leaves that out.
///
/// ```
/// use fp8_optim::{ResumableOptimizer, NoOptimizer};
/// let state = NoOptimizer.optimizer_state()?;
/// assert!(state.tensors().is_empty());
/// # Ok::<(), fp8_optim::OptimError>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoOptimizer;

const NONE: &str = "none";

impl ResumableOptimizer for NoOptimizer {
    fn optimizer_state(&self) -> Result<OptimizerState> {
        Ok(OptimizerState::new(NONE))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()> {
        state.check_kind(NONE)?;
        state.check_names(std::iter::empty::<String>())
    }
}
