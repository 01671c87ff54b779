//! FP8 for candle: tensors in 8-bit floating point, a linear layer whose three GEMMs run in FP8, and differentiable
//! versions of the operations that candle-nn cuts from the autograd graph.
//!
//! This crate knows tensors and scales, but not recipes or parameter names: `fp8-recipes` decides which cast happens
//! where.

#![doc(test(attr(deny(warnings))))]

pub mod conv;
mod data;
pub mod device;
mod error;
mod fake_quant;
mod graph;
pub mod linear;
pub mod ops;
#[cfg(feature = "cuda")]
pub mod optim;
mod packed;
pub mod parallel;
pub mod profile;
mod quantize;
mod recall;
mod scale_source;
pub mod scaled;
mod simd;
pub mod state;
mod stochastic;
mod tensor;
pub mod weight_version;
pub mod wide;

pub use device::ScalePolicy;
pub use error::{Error, Result};
pub use fake_quant::{cast_values_and_gradient, fake_quantize, grad_cast};
pub use linear::{GemmPlan, LinearPlan, LinearWeight, ResultCasts, WeightCache, fp8_linear};
pub use packed::PackedWeight;
pub use quantize::{CastCounter, CastHook, Quantized, Quantizer};
pub use recall::{CastNotes, Recall, Repetition};
pub use scale_source::{FirstScale, ScaleSource};
pub use state::{Observer, Role, Slot, StateTable};
pub use stochastic::{Draw, Stochastic};
pub use tensor::Fp8Tensor;
pub use wide::{Wide, WideLinear, WideNode};

use candle_core::{Device, Tensor};

/// A 64-bit hash of all bits of `x`, on any device. A tensor on a GPU is copied to the host first.
pub fn fingerprint(x: &Tensor) -> Result<u64> {
    let here = match device::backend(x.device())?.fingerprint(x)? {
        Some(fingerprint) => return Ok(fingerprint),
        None => x.to_device(&Device::Cpu)?,
    };
    match device::backend(&Device::Cpu)?.fingerprint(&here)? {
        Some(fingerprint) => Ok(fingerprint),
        None => Err(Error::Device(here.device().location())),
    }
}
