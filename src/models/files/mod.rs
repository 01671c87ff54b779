//! Files of models: entries of configurations, GGUF, the hub.

mod entries;
pub mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
#[cfg(feature = "hub")]
pub mod remote;

pub(crate) use entries::{Entries, read_json};
