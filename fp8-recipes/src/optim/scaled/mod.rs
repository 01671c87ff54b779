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
//! use fp8_candle::scaled::ScaledVar;
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
use fp8_candle::scaled::ScaledGrads;
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

/// An optimizer of scaled parameters.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::scaled::ScaledVar;
/// use fp8::optim::scaled::{ScaledOptimizer, ScaledSgd};
/// use fp8::optim::SgdConfig;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let w = ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
/// let mut optimizer: Box<dyn ScaledOptimizer> =
///     Box::new(ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?);
/// optimizer.set_lr(0.5)?;
/// let report = optimizer.apply(&w.value().sum_all()?.backward()?)?;
/// assert_eq!((report.updated, optimizer.steps()), (1, 1));
/// assert_eq!(w.value().to_vec1()?, [0.5; 4]);
/// # Ok(()) }
/// ```
pub trait ScaledOptimizer: CheckpointOptimizer {
    /// One step with these gradients: clips, updates every variable that has a gradient, and says what it did. Variables without a
    /// gradient are left alone. Gradients with NaN or an infinity change nothing, and the report says so.
    ///
    /// # Errors
    /// A gradient of another shape or device than its variable, or of f64, before anything is changed.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// # use fp8_recipes::optim::SgdConfig;
    /// # use fp8_recipes::optim::scaled::*;
    /// let w = ScaledVar::new("w", &Tensor::ones(2, DType::F16, &Device::Cpu)?)?;
    /// let mut optimizer = ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?;
    /// let report = optimizer.apply(&w.value().sum_all()?.backward()?)?;
    /// assert!(!report.skipped()? && report.updated == 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn apply(&mut self, grads: &ScaledGrads) -> Result<StepReport>;

    /// The learning rate of the next step.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// # use fp8_recipes::optim::SgdConfig;
    /// # use fp8_recipes::optim::scaled::*;
    /// let w = ScaledVar::new("w", &Tensor::ones(2, DType::F16, &Device::Cpu)?)?;
    /// let mut optimizer = ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?;
    /// optimizer.set_lr(0.25)?;
    /// assert_eq!(optimizer.lr(), 0.25);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn lr(&self) -> f64;

    /// Sets the learning rate of the next step.
    ///
    /// # Errors
    /// [`InvalidHyperparameter`](super::OptimError::InvalidHyperparameter) if `lr` is NaN, infinite or negative; the old one stays.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// # use fp8_recipes::optim::SgdConfig;
    /// # use fp8_recipes::optim::scaled::*;
    /// let w = ScaledVar::new("w", &Tensor::ones(2, DType::F16, &Device::Cpu)?)?;
    /// let mut optimizer = ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?;
    /// optimizer.set_lr(0.25)?;
    /// assert!(optimizer.set_lr(f64::NAN).is_err() && optimizer.lr() == 0.25);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn set_lr(&mut self, lr: f64) -> Result<()>;

    /// Steps taken, skipped ones not counted.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// # use fp8_recipes::optim::SgdConfig;
    /// # use fp8_recipes::optim::scaled::*;
    /// let w = ScaledVar::new("w", &Tensor::ones(2, DType::F16, &Device::Cpu)?)?;
    /// let mut optimizer = ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?;
    /// optimizer.apply(&w.value().sum_all()?.backward()?)?;
    /// assert_eq!(optimizer.steps(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn steps(&self) -> u64;

    /// What rounding and rescaling have done so far.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// # use fp8_recipes::optim::SgdConfig;
    /// # use fp8_recipes::optim::scaled::*;
    /// let w = ScaledVar::new("w", &Tensor::ones(2, DType::F16, &Device::Cpu)?)?;
    /// let mut optimizer = ScaledSgd::from_vars(vec![w.clone()], SgdConfig::default())?;
    /// optimizer.apply(&w.value().sum_all()?.backward()?)?;
    /// assert_eq!(optimizer.counts().saturated, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    fn counts(&self) -> ScaledCounts;
}
