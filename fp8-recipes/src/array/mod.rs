//! What a model computes on: plain tensors, scaled ones, or values of a node of candle's graph that is being built.

mod forms;
mod in_node;
mod kinds;
mod layer;
mod operations;

pub(crate) use in_node::{InNode, passed_on};
pub use layer::Layer;
pub use operations::Array;
