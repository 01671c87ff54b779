//! FP8 for candle: tensors in 8-bit floating point, the linear layer whose three GEMMs run in FP8, and the
//! differentiable building blocks that candle-nn cuts from the autograd graph.
//!
//! This crate knows tensors and scales, not recipes or names: `fp8-recipes` decides which cast happens where.

pub mod delayed;
pub mod device;
mod error;
mod fake_quant;
pub mod linear;
pub mod ops;
#[cfg(feature = "cuda")]
pub mod optim;
mod packed;
mod quantize;
mod ready;
mod simd;
mod tensor;

pub use delayed::DelayedSlot;
pub use device::ScalePolicy;
pub use error::Error;
pub use fake_quant::{cast_values_and_gradient, fake_quantize, grad_cast};
pub use linear::{GemmPlan, LinearPlan, LinearWeight, WeightCache, fp8_linear};
pub use packed::PackedWeight;
pub use quantize::{CastCounter, Quantized, Quantizer, ScaleSource};
pub use tensor::Fp8Tensor;
