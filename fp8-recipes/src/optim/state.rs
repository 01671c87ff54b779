//! The state of an optimizer in a training checkpoint.

use std::collections::{HashMap, HashSet};

use candle_core::{DType, Device, Shape, Tensor};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::error::{OptimError, Result};
use super::loss_scaler::LossScalerState;
use crate::check::first_outside;

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
/// The checkpoint saves the variables themselves. An optimizer of your own that is not a [`Rule`](super::Rule):
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::backprop::GradStore;
/// use candle_core::{DType, Tensor, Var};
/// use fp8::optim::{ResumableOptimizer, OptimError, OptimizerState};
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
/// impl ResumableOptimizer for Momentum {
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
pub trait ResumableOptimizer {
    /// Everything except the variables that later steps depend on. Later steps must not change its tensors.
    ///
    /// # Errors
    /// If a tensor cannot be made or copied from its device.
    fn optimizer_state(&self) -> Result<OptimizerState>;

    /// Restores a state made by [`ResumableOptimizer::optimizer_state`], on whatever devices its tensors are: all of it, or after an error
    /// nothing. An implementation checks everything before it changes anything.
    ///
    /// # Errors
    /// [`OptimError::StateKind`] for the state of another optimizer, and whatever else does not fit.
    fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<()>;

    /// Whether every step announces the weights that it changes ([`weight_version`](fp8_candle::weight_version)). Only then does a GPU keep
    /// FP8 copies of weights from step to step; if this were true of an optimizer that does not announce, it would use old copies for ever.
    /// The default is false.
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
        reader.known.extend(known.into_iter().map(Into::into));
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
/// # use fp8_recipes as fp8;
/// use fp8::optim::{ResumableOptimizer, NoOptimizer};
/// let state = NoOptimizer.optimizer_state()?;
/// assert!(state.tensors().is_empty());
/// # Ok::<(), fp8_recipes::optim::OptimError>(())
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

/// Reads the tensors of a state, and remembers which names it has asked for.
pub struct StateReader<'a> {
    tensors: &'a HashMap<String, Tensor>,
    known: HashSet<String>,
}

impl<'a> StateReader<'a> {
    pub(super) fn new(tensors: &'a HashMap<String, Tensor>) -> Self {
        Self {
            tensors,
            known: HashSet::new(),
        }
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// The tensor with this name, dtype and shape, whatever its values are.
    pub(super) fn take_unchecked(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &Shape,
    ) -> Result<&'a Tensor> {
        let tensor = find(self.tensors, name, dtype, shape)?;
        self.known.insert(name.to_string());
        Ok(tensor)
    }

    /// The tensor with this name, dtype and shape, whose values are finite, and not negative if so asked. A step whose gradients are not
    /// finite is skipped, so no step gives other moments.
    pub(super) fn take(
        &mut self,
        name: &str,
        dtype: DType,
        shape: &Shape,
        non_negative: bool,
    ) -> Result<&'a Tensor> {
        let tensor = self.take_unchecked(name, dtype, shape)?;
        let fits = |value: f64| value.is_finite() && !(non_negative && value < 0.0);
        let Some((index, value)) = first_outside(tensor, fits)? else {
            return Ok(tensor);
        };
        Err(OptimError::StateValue {
            name: name.to_string(),
            index,
            value,
            expected: match non_negative {
                true => "finite and not negative",
                false => "finite",
            },
        })
    }

    /// Accepts a name.
    pub(super) fn know(&mut self, name: &str) {
        self.known.insert(name.to_string());
    }

    /// The count with this name: i64, one element.
    pub(super) fn count(&mut self, name: &str) -> Result<u64> {
        let tensor = get(self.tensors, name)?;
        check_dtype(name, DType::I64, tensor)?;
        if tensor.elem_count() != 1 {
            return Err(wrong_shape(name, &().into(), tensor));
        }
        let got = tensor.flatten_all()?.to_vec1::<i64>()?[0];
        u64::try_from(got).map_err(|_| OptimError::NegativeStep {
            name: name.to_string(),
            got,
        })
    }

    /// Fails with the first name, in alphabetical order, that nothing has asked for.
    pub(super) fn finish(self) -> Result<()> {
        let unexpected = (self.tensors.keys()).filter(|name| !self.known.contains(*name));
        match unexpected.min() {
            None => Ok(()),
            Some(name) => Err(OptimError::UnexpectedState { name: name.clone() }),
        }
    }
}

/// A count as [`StateReader::count`] reads it.
pub(super) fn count_tensor(count: u64) -> Result<Tensor> {
    let count = i64::try_from(count).unwrap_or(i64::MAX);
    Ok(Tensor::new(count, &Device::Cpu)?)
}

fn get<'a>(tensors: &'a HashMap<String, Tensor>, name: &str) -> Result<&'a Tensor> {
    tensors.get(name).ok_or_else(|| OptimError::MissingState {
        name: name.to_string(),
    })
}

fn find<'a>(
    tensors: &'a HashMap<String, Tensor>,
    name: &str,
    dtype: DType,
    shape: &Shape,
) -> Result<&'a Tensor> {
    let tensor = get(tensors, name)?;
    if tensor.shape() != shape {
        return Err(wrong_shape(name, shape, tensor));
    }
    check_dtype(name, dtype, tensor)?;
    Ok(tensor)
}

fn wrong_shape(name: &str, expected: &Shape, got: &Tensor) -> OptimError {
    OptimError::StateShape {
        name: name.to_string(),
        expected: expected.clone(),
        got: got.shape().clone(),
    }
}

fn check_dtype(name: &str, expected: DType, tensor: &Tensor) -> Result<()> {
    let got = tensor.dtype();
    if got == expected {
        return Ok(());
    }
    Err(OptimError::StateDtype {
        name: name.to_string(),
        expected,
        got,
    })
}
