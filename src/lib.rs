//! One face for the workspace: [`core`] (formats and scaling maths), [`candle`] (tensors and
//! operations) and [`recipes`] (guard, layers, conversion, checkpoints).

pub use fp8_candle as candle;
pub use fp8_core as core;
pub use fp8_recipes as recipes;

#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
