//! The optimizer's operations on a CUDA device. The optimizer itself, with its names, state and CPU update, is
//! `fp8_recipes::optim`.

pub use crate::device::cuda::adamw::{
    AdamWDecision, AdamWHyperparameters, AdamWTensors, MultiTensorAdamW,
};
