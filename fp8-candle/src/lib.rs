//! FP8 for candle: tensors in 8-bit floating point, a linear layer whose three GEMMs run in FP8, and differentiable
//! versions of the operations that candle-nn cuts from the autograd graph.
//!
//! This crate knows tensors and scales, but not recipes or parameter names: `fp8-recipes` decides which cast happens
//! where.

#![doc(test(attr(deny(warnings))))]

mod base;
mod cast;
pub mod device;
mod graph;
mod layers;
pub mod ops;
#[cfg(feature = "cuda")]
pub mod optim;
#[cfg(feature = "cuda")]
mod recorded;

pub use base::error::{Error, Result};
pub use base::{parallel, profile};
pub use cast::packed::PackedWeight;
pub use cast::quantizer::Quantizer;
pub use cast::replay::{Recording, Replay};
pub use cast::scaled_mm::{scaled_mm, scaled_mm_fp8};
pub use cast::shards::{LayerShards, Shards};
pub use cast::spec::{CastCounter, CastHook, CastSpec, FirstScale, Observers, ScaleSource};
pub use cast::state::{AmaxRecorder, Role, Slot, StateTable};
pub use cast::stochastic::{Draw, Stochastic};
pub use cast::tensor::{Fp8Tensor, Quantized};
pub use cast::weight_cache::WeightCache;
pub use cast::{state, weight_version};
pub use device::ScalePolicy;
pub use graph::wide;
pub use graph::wide::{Wide, WideNode};
pub use layers::linear::{
    GemmPlan, LinearPlan, LinearWeight, ResultCasts, WeightSource, WideLinear, fp8_linear,
};
pub use layers::{InputScaling, StaticWeight, conv, linear};
pub use ops::fake_quant::{cast_values_and_gradient, fake_quantize, grad_cast};
#[cfg(feature = "cuda")]
pub use recorded::RecordedStep;

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
