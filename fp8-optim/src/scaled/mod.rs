//! Optimizers of [scaled](fp8_scaled) parameters: parameters and moments are 16-bit data with a scale each, and no f32 copy of
//! anything exists.
//!
//! # Scales
//! A step computes in f32 registers, in units of the scales, and rounds once. New data keep the old scale while the bound on their largest
//! magnitude, which follows from the old data and the gradient, lies in a window: 2^0..2^8 for parameters, whose data are cast to FP8
//! without another scale, 2^4..2^14 for moments. Otherwise the scale changes by a power of two. The decision depends on ratios alone, so a
//! power of two as a factor of all gradients changes scales only. Where the range of scales ends, data beyond f16 saturate and are counted
//! ([`ScaledCounts`]).
//!
//! # Devices
//! The CPU. Parameters on another device are refused ([`OptimError::ScaledDevice`](super::OptimError::ScaledDevice)).
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fp8_scaled::ScaledVar;
//! use fp8_optim::AdamWConfig;
//! use fp8_optim::scaled::{ScaledAdamW, ScaledOptimizer};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let w = ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?;
//! let config = AdamWConfig { lr: 0.25, weight_decay: 0., ..Default::default() };
//! let mut adam = ScaledAdamW::from_vars(vec![w.clone()], config)?;
//! let report = adam.apply(&w.value().sum_all()?.backward()?)?;
//! assert!(!report.skipped()?);
//! assert!(w.value().to_vec1()?.iter().all(|w| (w - 0.75).abs() < 1e-3));
//! # Ok(()) }
//! ```

mod grad;
mod optimizer;
pub(crate) mod parameter;
pub(crate) mod rule;
pub(crate) mod size;

pub use super::adamw::ScaledAdamW;
pub use super::rounding::{RoundTo, ScaledCounts};
pub use super::sgd::ScaledSgd;
pub use optimizer::ScaledOptimizer;
pub use parameter::ScaledParameter;
