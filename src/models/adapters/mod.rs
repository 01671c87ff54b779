//! Adapters of low rank (LoRA) beside the linear layers of a model: several on one base, of which one is active.

mod host;
mod operations;
mod slots;

pub(crate) use host::Host;
pub(crate) use operations::{add, load, load_trainable, merge, remove, save, set};
pub(crate) use slots::Adapters;
