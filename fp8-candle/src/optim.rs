//! The kernels of AdamW on a CUDA device. The optimizer itself, with names, state and the update on the CPU, is in the crate
//! `fp8-optim`.

pub use crate::device::cuda::adamw::MultiTensorAdamW;
pub use crate::device::cuda::adamw_tensors::{
    AdamWDecision, AdamWHyperparameters, AdamWMoments, AdamWTensors, CodedMoment,
};
