//! Nodes of candle's graph: how a computed result and a backward function become one, and where gradients are collected.
//!
//! candle's custom ops compute inside `cpu_fwd` and `cuda_fwd`, on raw storages, with three arguments at most. Here results come from
//! ordinary code on detached tensors of any device; [`attach`] makes a node of one, with any number of arguments.

mod attach;
mod collect;
mod links;
pub mod wide;

pub use attach::node;
pub(crate) use attach::{Ready, attach, attach_all};
pub use collect::{GradientListener, backward, backward_with};
pub(crate) use collect::{is_open, offer_rows, with_rows};
