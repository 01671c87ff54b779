//! Casts: FP8 tensors, where their scales come from, the state of delayed scaling, and the replay of casts.

pub(crate) mod packed;
pub(crate) mod quantize;
pub(crate) mod recall;
pub(crate) mod same;
pub(crate) mod scale_source;
pub mod state;
pub(crate) mod stochastic;
pub(crate) mod tensor;
pub mod weight_version;
