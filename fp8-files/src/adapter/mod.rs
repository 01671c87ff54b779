//! Adapters in the format of PEFT: a directory with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! An adapter is a pair of matrices of low rank (LoRA) for each of some linear layers of a base model. The configuration names the
//! layers, the file holds the matrices as `base_model.model.{path}.lora_A.weight` and `.lora_B.weight`. Layers that the
//! adapter replaces (`modules_to_save`) are in it whole, as `base_model.model.{path}.weight` and `.bias`.

mod config;
mod file;
mod identity;
mod json;
mod naming;
mod targets;

pub use crate::error::AdapterError;
pub use config::AdapterConfig;
pub use file::{AdapterFile, SavedLayer, write_adapter, write_adapter_with};
pub use identity::identity;
pub use naming::Naming;
pub use targets::Targets;

/// The configuration's file in the directory of an adapter.
pub const CONFIG_FILE: &str = "adapter_config.json";
/// The tensors' file in the directory of an adapter.
pub const TENSORS_FILE: &str = "adapter_model.safetensors";
/// What stands before the path of a layer in the names of an adapter's tensors.
pub const PREFIX: &str = "base_model.model";
/// Metadata entry of a model's files: a JSON list of the [identities](identity()) of the adapters whose updates the weights have.
pub const MERGED: &str = "fp8_merged_adapters";
