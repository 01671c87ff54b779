#![doc = include_str!("../README.md")]
#![doc = ""]
#![doc = "# Where things are"]
#![doc = ""]
#![doc = "Everything of [`fp8_recipes`] stands at the root of this crate. [`guide`] explains it by task. [`fp8_core`] has formats and"]
#![doc = "the maths of scales, [`fp8_candle`] FP8 tensors and differentiable operations."]

pub mod guide;
mod memory;

pub use fp8_candle;
pub use fp8_core;
// The derive beside the trait of the same name; its code names this crate.
pub use fp8_derive::Fp8ModuleOfFacade as Fp8Module;
pub use fp8_recipes;
pub use fp8_recipes::*;
pub use memory::keep_freed_memory;
