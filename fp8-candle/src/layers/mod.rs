//! Layers whose products run in FP8, forward and backward.

pub mod conv;
pub mod linear;
