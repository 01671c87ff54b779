//! What a training checkpoint asks of an optimizer.

use std::collections::HashMap;

use candle_core::{DType, Shape, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::state::{check_names, checked};
use super::{LossScalerState, OptimError};

/// An optimizer whose state goes into a training checkpoint and comes back from it:
/// [`save_training`](crate::checkpoint::save_training) and
/// [`resume_training`](crate::checkpoint::resume_training) take any.
///
/// | optimizer | what comes back |
/// |---|---|
/// | [`AdamW`](super::AdamW) | everything: moments, master weights, step, hyperparameters |
/// | [`Sgd`](super::Sgd) | everything: momentum, master weights, step, hyperparameters |
/// | [`LossScaled`](super::LossScaled) | what comes back of the optimizer in it, and the loss scaler |
/// | [`EmulatedOptimizer`](crate::emulation::EmulatedOptimizer) | what comes back of the optimizer, the loss scaler and the count of steps |
/// | `candle_nn::SGD` | everything: its learning rate |
/// | `candle_nn::AdamW` | its hyperparameters; moments and step are private and start from zero |
/// | [`NoOptimizer`] | nothing; for programs that save without one |
///
/// The variables themselves are not the optimizer's to save. An optimizer of your own:
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::backprop::GradStore;
/// use candle_core::{DType, Tensor, Var};
/// use fp8::optim::{CheckpointOptimizer, OptimError, OptimizerState};
///
/// /// `velocity = momentum * velocity + gradient; variable -= lr * velocity`
/// struct Momentum { lr: f64, momentum: f64, vars: Vec<(String, Var)>, velocity: Vec<Tensor> }
///
/// impl Momentum {
///     fn step(&mut self, grads: &GradStore) -> candle_core::Result<()> {
///         for ((_, var), velocity) in self.vars.iter().zip(&mut self.velocity) {
///             if let Some(grad) = grads.get(var) {
///                 *velocity = ((&*velocity * self.momentum)? + grad)?;
///                 var.set(&(var.as_tensor() - (&*velocity * self.lr)?)?)?;
///             }
///         }
///         Ok(())
///     }
/// }
///
/// const KIND: &str = "my_crate.Momentum";
///
/// impl CheckpointOptimizer for Momentum {
///     fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
///         let mut state = OptimizerState::new(KIND).with_hyperparameters((self.lr, self.momentum))?;
///         for ((name, _), velocity) in self.vars.iter().zip(&self.velocity) {
///             state = state.with_tensor(format!("{name}.velocity"), velocity.clone());
///         }
///         Ok(state)
///     }
///
///     fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
///         // Check everything first ..
///         state.check_kind(KIND)?;
///         let numbers: Option<(f64, f64)> = state.hyperparameters()?;
///         let mut velocity = vec![];
///         for (name, var) in &self.vars {
///             let name = format!("{name}.velocity");
///             velocity.push(state.tensor(&name, var.dtype(), var.shape())?.to_device(var.device())?);
///         }
///         state.check_names(self.vars.iter().map(|(name, _)| format!("{name}.velocity")))?;
///         // .. then change.
///         self.velocity = velocity;
///         if let Some((lr, momentum)) = numbers {
///             (self.lr, self.momentum) = (lr, momentum);
///         }
///         Ok(())
///     }
/// }
/// # use candle_core::Device;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let make = |lr| -> candle_core::Result<Momentum> {
/// #     let w = Var::ones(3, DType::F32, &Device::Cpu)?;
/// #     let velocity = vec![w.zeros_like()?];
/// #     Ok(Momentum { lr, momentum: 0.9, vars: vec![("w".into(), w)], velocity })
/// # };
/// # let mut first = make(0.1)?;
/// # let loss = first.vars[0].1.sqr()?.sum_all()?;
/// # first.step(&loss.backward()?)?;
/// # let mut second = make(0.5)?;
/// # second.load_optimizer_state(&first.optimizer_state()?)?;
/// # assert_eq!(second.lr, 0.1);
/// # assert_eq!(second.velocity[0].to_vec1::<f32>()?, [2.; 3]);
/// # let other = OptimizerState::new("other");
/// # assert!(matches!(second.load_optimizer_state(&other), Err(OptimError::StateKind { .. })));
/// # Ok(()) }
/// ```
pub trait CheckpointOptimizer {
    /// Everything that later steps depend on beside the variables. Later steps must not change its tensors.
    ///
    /// # Errors
    /// If a tensor cannot be made or copied from its device.
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError>;

    /// Puts a state back that [`CheckpointOptimizer::optimizer_state`] has made, on whatever devices its tensors are. It comes back
    /// whole or not at all: an implementation checks everything before it changes anything.
    ///
    /// # Errors
    /// [`OptimError::StateKind`] for the state of another optimizer, and whatever else does not fit.
    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError>;

    /// Whether every step announces the weights that it changes
    /// ([`weight_version`](fp8_candle::weight_version)). A GPU keeps FP8 copies of weights from step to step only if so; it would use
    /// old copies for ever if this were said of an optimizer that does not announce. False unless overridden.
    fn announces_changes(&self) -> bool {
        false
    }

    /// Whether [`CheckpointOptimizer::load_optimizer_state`] brings a loss scaler back. Where it does not, resuming from a checkpoint
    /// that has one says so in a warning. False unless overridden.
    fn scales_loss(&self) -> bool {
        false
    }
}

/// The state of an optimizer: which one it is, named tensors, and hyperparameters as JSON.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8::optim::{OptimError, OptimizerState};
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
    /// A state without tensors and hyperparameters. `kind` names the optimizer and, if its state changes from version to version,
    /// the version: only a state of the same kind can be loaded. Put your crate's name before it.
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

    /// Adds the count of steps, those left out included, of the run that drives the optimizer: an
    /// [`Emulator`](crate::emulation::Emulator)'s.
    pub fn with_global_steps(mut self, steps: u64) -> Self {
        self.global_steps = Some(steps);
        self
    }

    /// That count, if the run keeps one.
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
    pub fn with_hyperparameters(
        mut self,
        hyperparameters: impl Serialize,
    ) -> Result<Self, OptimError> {
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

    /// The hyperparameters; None if the optimizer is to keep its own, as
    /// [`ResumeOptions::keep_hyperparameters`](crate::checkpoint::ResumeOptions::keep_hyperparameters) asks.
    ///
    /// # Errors
    /// [`OptimError::StateHyperparameters`] if they are no `T`.
    pub fn hyperparameters<T: DeserializeOwned>(&self) -> Result<Option<T>, OptimError> {
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
    pub fn tensor(&self, name: &str, dtype: DType, shape: &Shape) -> Result<&Tensor, OptimError> {
        checked(&self.tensors, name, dtype, shape)
    }

    /// Fails unless this is the state of the optimizer `expected`.
    ///
    /// # Errors
    /// [`OptimError::StateKind`].
    pub fn check_kind(&self, expected: &str) -> Result<(), OptimError> {
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
    pub fn check_names(
        &self,
        known: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<(), OptimError> {
        let known = known.into_iter().map(Into::into).collect();
        check_names(&self.tensors, &known)
    }

    fn hyperparameters_error(&self, error: serde_json::Error) -> OptimError {
        OptimError::StateHyperparameters {
            kind: self.kind.clone(),
            reason: error.to_string(),
        }
    }
}

/// Stands where [`save_training`](crate::checkpoint::save_training) and
/// [`resume_training`](crate::checkpoint::resume_training) expect an optimizer, in a program that has none to save. The checkpoint of
/// an optimizer is refused, unless
/// [`ResumeOptions::fresh_optimizer`](crate::checkpoint::ResumeOptions::fresh_optimizer) leaves that out.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::optim::{CheckpointOptimizer, NoOptimizer};
/// let state = NoOptimizer.optimizer_state()?;
/// assert!(state.tensors().is_empty());
/// # Ok::<(), fp8_recipes::optim::OptimError>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct NoOptimizer;

const NONE: &str = "none";

impl CheckpointOptimizer for NoOptimizer {
    fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
        Ok(OptimizerState::new(NONE))
    }

    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
        state.check_kind(NONE)?;
        state.check_names(std::iter::empty::<String>())
    }
}
