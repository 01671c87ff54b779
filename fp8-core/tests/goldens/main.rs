//! Casts, scales and delayed scaling against the outputs of other libraries.

mod casts;
#[path = "../common/mod.rs"]
mod common;
mod delayed;
mod mpemu;
mod presets;
mod torchao;
