//! Files of models: entries of configurations, GGUF, the hub.

mod entries;
pub mod gguf;
#[cfg(feature = "hub")]
pub mod hub;
mod json;

pub(crate) use entries::Entries;
pub(crate) use json::{read_json, token_ids};
