//! Trainable updates of low rank beside frozen linear layers.

mod config;
mod linear;
mod update;

pub use config::LoraConfig;
pub use linear::LoraLinear;
pub use update::LoraUpdate;
