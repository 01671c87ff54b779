//! Scaled arithmetic: every tensor is a pair of low-precision data and a scale, and every operation, forward and backward,
//! has a rule for the scale of its result. Training then needs neither loss scaling nor a copy of the weights in f32.
//!
//! [`Scaled`] is the tensor, [`ScaledVar`] a parameter; [`Scaled::backward`] gives [`ScaledGrads`]. [`scaled_scope`] puts settings in
//! force: the precision of products, and how scales are rounded.
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use fp8_scaled::{Scaled, ScaledVar};
//! let w = Tensor::randn(0f32, 1.0, (64, 16), &Device::Cpu)?;
//! let w = ScaledVar::rescaled("w", &w, DType::F16)?;
//! // Values near 10^-7, too small for f16: the scale holds their size.
//! let x = Tensor::randn(0f32, 1.0, (8, 64), &Device::Cpu)?.to_dtype(DType::F16)?;
//! let x = Scaled::from_parts(&x, 2f32.powi(-23))?;
//! let y = x.matmul(&w.value())?;
//! assert_eq!(y.scale().to_f32(), 2f32.powi(-23) * w.scale().to_f32() * 8.0); // 8: the root of 64
//! let grads = y.sum_all()?.backward()?;
//! assert_eq!(grads.get(&w).unwrap().dims(), [64, 16]);
//! # Ok::<(), fp8_scaled::Error>(())
//! ```
//!
//! # Rules
//! Scales live on the host and follow from scales and shapes alone, so that nothing waits for a device; only [`Scaled::dynamic_rescale`]
//! reads data. Operations use ratios of scales, so multiplying an input by 2^20 changes no bit of any data. Operations on 16-bit data
//! compute in f32 and round once.
//!
//! Running sums, sorting, rounding to whole numbers and remainders have no rule: take the value with [`Scaled::to_tensor`].
//!
//! [`as_scaled`]`(&tensor, None)` makes an operand with the scale 1 from a **plain tensor**. The operators `+`, `-`, `*` and `/` work as
//! in candle; on their right they also take plain tensors and f64 constants:
//!
//! ```
//! use candle_core::{Device, Tensor};
//! use fp8_scaled::Scaled;
//! let plain = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
//! let x = Scaled::from_parts(&plain, 8.0)?;
//! let y = ((&x + &plain)? * 3.0)?;
//! assert_eq!((y.scale().to_f32(), y.to_vec1()?), (16.0, vec![27.0, 54.0]));
//! assert_eq!((&y / &x)?.to_vec1()?, [3.375, 3.375]);
//! # Ok::<(), fp8_scaled::Error>(())
//! ```
//!
//! A **zero scale** marks a tensor of zeros that imposes no size on others: sums, maxima, selections and concatenations with it take the
//! other operand's scale.
//!
//! Source: "Scalify: scale propagation for efficient low-precision LLM training", arXiv:2407.17353.

mod activation;
mod arith;
mod attention;
mod channel_norm;
mod check;
mod compare;
mod conv;
mod data_norm;
mod dropout;
mod dtype;
mod error;
pub mod files;
mod grads;
mod join;
#[cfg(test)]
mod kernel_tests;
mod kernels;
mod linear;
mod lookup;
mod loss;
mod matmul;
mod minmax;
mod norm;
mod observe;
mod operators;
mod options;
mod parameter;
mod parts;
mod pool;
mod prod;
mod read;
mod reduce;
mod rescale;
mod roots;
mod rope;
mod shape;
mod softmax;
mod tape;
mod transcend;
mod tree;
mod value;
mod var;
mod var_map;
mod version;

pub use data_norm::Norm;
pub use dtype::ScaledDType;
pub use error::{Error, Result};
pub use files::{ScaleStorage, load, save};
pub use fp8_core::scaled::{Pow2Rounding, Scale, ScaleCheck, ScaledError};
pub use grads::ScaledGrads;
pub use observe::OutOfRange;
pub use options::{MatmulPrecision, ScaledCounters, ScaledOptions, ScaledScope, scaled_scope};
pub use parameter::Parameter;
pub use rescale::Direction;
pub use tree::ScaledTree;
pub use value::{Scaled, as_scaled};
pub use var::ScaledVar;
pub use var_map::ScaledVarMap;
