//! What the tests of the workspace share: the device, data, comparisons, small models, hand-made files and the texts of warnings.
//!
//! Helpers panic where a test should fail.

pub mod approx;
pub mod child;
mod compare;
mod device;
pub mod differences;
pub mod memory;
pub mod models;
pub mod mpirun;
pub mod rounding;
mod tensors;
mod warnings;

#[cfg(feature = "recipes")]
pub mod calibrated;
#[cfg(feature = "recipes")]
pub mod configured;
#[cfg(feature = "files")]
pub mod encoder;
#[cfg(feature = "files")]
pub mod files;
#[cfg(feature = "files")]
pub mod golden_models;
#[cfg(feature = "files")]
pub mod language_model;
#[cfg(feature = "files")]
pub mod tokenizer;

#[cfg(feature = "recipes")]
mod layer;
#[cfg(feature = "recipes")]
mod mlp;
#[cfg(feature = "recipes")]
mod step;

pub use compare::*;
pub use device::*;
#[cfg(feature = "recipes")]
pub use layer::*;
#[cfg(feature = "recipes")]
pub use mlp::*;
#[cfg(feature = "recipes")]
pub use step::*;
pub use tensors::*;
pub use warnings::*;
