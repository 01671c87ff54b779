//! The optimizer's operations on a CUDA device. The optimizer itself, with names, state and the CPU update, is in
//! `fp8_recipes::optim`.

pub use crate::device::cuda::adamw::MultiTensorAdamW;
pub use crate::device::cuda::adamw_tensors::{AdamWDecision, AdamWHyperparameters, AdamWTensors};
