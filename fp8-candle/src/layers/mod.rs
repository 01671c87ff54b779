//! Layers whose products run in FP8, forward and backward.

pub mod conv;
pub mod linear;
mod static_weight;

pub use static_weight::{InputScaling, StaticWeight};
