//! Casts: FP8 tensors and their products, where their scales come from, the state of delayed scaling, and the replay of recorded casts.

pub(crate) mod computed;
pub(crate) mod kept;
pub(crate) mod packed;
mod part;
pub(crate) mod quantizer;
pub(crate) mod replay;
pub(crate) mod scaled_mm;
pub(crate) mod shards;
pub(crate) mod sharing;
pub(crate) mod spec;
pub mod state;
pub(crate) mod stochastic;
pub(crate) mod tensor;
pub(crate) mod weight_cache;
pub mod weight_version;
