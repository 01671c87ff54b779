//! The name that `candle_nn` keeps for [`attention::varlen`](super::attention::varlen).

pub use super::attention::varlen::*;
