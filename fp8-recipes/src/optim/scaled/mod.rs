//! Optimizers of [scaled](crate::scaled) parameters: parameters and moments are 16-bit data with a scale each, and no f32 copy of
//! anything exists.
//!
//! | file | concern |
//! |---|---|
//! | `sgd.rs`, `adamw.rs` | [`ScaledSgd`], [`ScaledAdamW`]: the numbers of a step, the arithmetic of an element |
//! | `core.rs` | what both share: variables, groups, the order of a step |
//! | `slot.rs` | one variable with its moments |
//! | `size.rs` | which scale new data get |
//! | `kernel.rs` | the pass over memory, in f32 pieces |
//! | `value.rs` | the dtypes it runs over |
//! | `grad.rs` | gradients: f16, bf16, f32 or FP8; their norm |
//! | `state.rs` | saving and loading |
//!
//! # Scales
//! A step computes in f32 registers, in units of the scales, and rounds once. New data get the old scale unless their largest
//! magnitude, bounded before the step from those of the old data and of the gradient, lies outside a window: 2^0..2^8 for parameters, whose data go
//! into FP8 as they are, 2^4..2^14 for moments. Then the scale moves by a power of two. The decision looks at ratios alone, so a factor
//! of a power of two on all gradients changes scales only. Data that a scale at the end of its range leaves beyond f16 saturate, and
//! are counted ([`ScaledCounts`]).
//!
//! # Devices
//! The CPU. Parameters on another device are refused ([`OptimError::ScaledDevice`](super::OptimError::ScaledDevice)).
//!
//! ```
//! # use fp8_recipes as fp8;
//! use candle_core::{DType, Device, Tensor};
//! use fp8_scaled::ScaledVar;
//! use fp8::optim::AdamWConfig;
//! use fp8::optim::scaled::{ScaledAdamW, ScaledOptimizer};
//! use fp8::scaled::ScaledVarMap;
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let params = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
//! let w = ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
//! params.insert(&w)?;
//! let mut adam = ScaledAdamW::new(&params, AdamWConfig { lr: 0.25, weight_decay: 0., ..Default::default() })?;
//! let report = adam.apply(&w.value().sum_all()?.backward()?)?;
//! assert!(!report.skipped()?);
//! assert!(w.value().to_vec1()?.iter().all(|w| (w - 0.75).abs() < 1e-3));
//! # Ok(()) }
//! ```

mod adamw;
mod core;
mod grad;
mod kernel;
mod report;
mod sgd;
mod size;
mod slot;
mod state;
mod value;

pub use adamw::ScaledAdamW;
pub use report::ScaledCounts;
pub use sgd::ScaledSgd;

use super::error::Result;
use super::{CheckpointOptimizer, StepReport};
use fp8_scaled::ScaledGrads;
#[cfg(doc)]
use fp8_scaled::ScaledVar;
use serde::{Deserialize, Serialize};

/// How a step rounds parameters and moments to 16 bits.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::optim::scaled::RoundTo;
/// assert_eq!(RoundTo::default(), RoundTo::Stochastic { seed: 0 });
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RoundTo {
    /// To the nearest value: changes below half a unit in the last place are lost.
    Nearest,
    /// Up or down at random, so that the mean is the value itself. The bits follow from the seed, the step, the variable's place
    /// among the sorted names and the element's index: not from the number of threads.
    Stochastic {
        /// Another seed, other bits.
        seed: u64,
    },
}

impl Default for RoundTo {
    fn default() -> Self {
        Self::Stochastic { seed: 0 }
    }
}

/// An optimizer of scaled parameters: [`ScaledSgd`], [`ScaledAdamW`], or one of your own, which whatever takes an optimizer takes
/// ([`scaled::save_training`](crate::scaled::save_training) too).
///
/// A step reads values in f32 (`to_tensor`), computes, and hands new ones to [`ScaledVar::set_rescaled`], which chooses their scale
/// and has FP8 copies made anew; [`ScaledVar::set`] takes data with a scale of your choice. What it keeps between steps goes into
/// its state.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::{ScaledGrads, ScaledVar};
/// use fp8::optim::scaled::ScaledOptimizer;
/// use fp8::optim::{CheckpointOptimizer, OptimError, OptimizerState, StepReport};
///
/// /// `momentum = beta * momentum + (1 - beta) * gradient; variable -= lr * sign(momentum)`
/// struct SignMomentum {
///     vars: Vec<(ScaledVar, Tensor)>,
///     lr: f64,
///     beta: f64,
///     steps: u64,
/// }
///
/// impl ScaledOptimizer for SignMomentum {
///     fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport, OptimError> {
///         let mut next = vec![];
///         let mut squares = 0f64;
///         for (at, (var, momentum)) in self.vars.iter().enumerate() {
///             let Some(grad) = grads.get(var) else { continue };
///             let grad = grad.to_tensor(DType::F32)?;
///             squares += f64::from(grad.sqr()?.sum_all()?.to_scalar::<f32>()?);
///             let momentum = ((momentum * self.beta)? + (grad * (1. - self.beta))?)?;
///             let change = (momentum.sign()? * self.lr)?;
///             next.push((at, (var.value().to_tensor(DType::F32)? - change)?, momentum));
///         }
///         // Nothing has changed so far.
///         if !squares.is_finite() {
///             return Ok(StepReport::skipped_step(self.lr, next.len(), squares.sqrt(), self.steps));
///         }
///         let updated = next.len();
///         for (at, value, momentum) in next {
///             self.vars[at].0.set_rescaled(&value)?;
///             self.vars[at].1 = momentum;
///         }
///         self.steps += 1;
///         Ok(StepReport::taken(self.lr, updated, squares.sqrt(), 1.))
///     }
///
///     fn lr(&self) -> f64 {
///         self.lr
///     }
///
///     fn set_lr(&mut self, lr: f64) -> Result<(), OptimError> {
///         self.lr = lr;
///         Ok(())
///     }
///
///     fn steps(&self) -> u64 {
///         self.steps
///     }
/// }
///
/// impl CheckpointOptimizer for SignMomentum {
///     fn optimizer_state(&self) -> Result<OptimizerState, OptimError> {
///         let numbers = (self.lr, self.beta, self.steps);
///         let mut state = OptimizerState::new("my_crate.SignMomentum").with_hyperparameters(numbers)?;
///         for (var, momentum) in &self.vars {
///             state = state.with_tensor(format!("{}.momentum", var.name()), momentum.clone());
///         }
///         Ok(state)
///     }
///
///     fn load_optimizer_state(&mut self, state: &OptimizerState) -> Result<(), OptimError> {
///         state.check_kind("my_crate.SignMomentum")?;
///         let numbers: Option<(f64, f64, u64)> = state.hyperparameters()?;
///         let name = |var: &ScaledVar| format!("{}.momentum", var.name());
///         state.check_names(self.vars.iter().map(|(var, _)| name(var)))?;
///         let mut momenta = vec![];
///         for (var, _) in &self.vars {
///             momenta.push(state.tensor(&name(var), DType::F32, &var.dims().into())?);
///         }
///         for ((_, own), momentum) in self.vars.iter_mut().zip(momenta) {
///             *own = momentum.clone();
///         }
///         if let Some((lr, beta, steps)) = numbers {
///             (self.lr, self.beta, self.steps) = (lr, beta, steps);
///         }
///         Ok(())
///     }
/// }
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
/// let momentum = Tensor::zeros(4, DType::F32, &Device::Cpu)?;
/// let mut optimizer: Box<dyn ScaledOptimizer> =
///     Box::new(SignMomentum { vars: vec![(w.clone(), momentum)], lr: 0.125, beta: 0.9, steps: 0 });
/// for _ in 0..4 {
///     let report = optimizer.apply(&w.value().sum_all()?.backward()?)?;
///     assert_eq!((report.updated, report.grad_norm()?), (1, 2.));
/// }
/// assert_eq!(w.value().to_vec1()?, [0.5; 4]);
/// let state = optimizer.optimizer_state()?;
/// optimizer.load_optimizer_state(&state)?;
/// assert_eq!(optimizer.steps(), 4);
/// # Ok(()) }
/// ```
pub trait ScaledOptimizer: CheckpointOptimizer {
    /// One step with these gradients: clips, updates every variable that has a gradient, and says what it did. Variables without a
    /// gradient are left alone. Gradients with NaN or an infinity change nothing, and the report says so.
    ///
    /// # Errors
    /// A gradient of another shape or device than its variable, or of f64, before anything is changed.
    fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport>;

    /// The learning rate of the next step.
    fn lr(&self) -> f64;

    /// Sets the learning rate of the next step.
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) if `lr` is NaN, infinite or negative; the old one stays.
    fn set_lr(&mut self, lr: f64) -> Result<()>;

    /// Steps taken, skipped ones not counted.
    fn steps(&self) -> u64;

    /// What rounding and rescaling have done so far; nothing is counted unless overridden.
    fn counts(&self) -> ScaledCounts {
        ScaledCounts::default()
    }
}
