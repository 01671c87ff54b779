//! One face for the workspace: [`core`] (formats and scaling maths), [`candle`] (tensors and
//! operations) and [`recipes`] (guard, layers, conversion, checkpoints). [`keep_freed_memory`] is worth a line in every
//! program that trains.

mod memory;

pub use fp8_candle as candle;
pub use fp8_core as core;
pub use fp8_recipes as recipes;
// The derive beside the trait of the same name; its code names this crate.
pub use fp8_derive::Fp8ModuleOfFacade as Fp8Module;
pub use fp8_recipes::*;
pub use memory::keep_freed_memory;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
