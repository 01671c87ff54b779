//! What must hold for any input: casts, grids, scales and random rounding against their definitions.

mod casts;
#[path = "../common/mod.rs"]
mod common;
mod half_rounding;
mod rows;
mod scaled_rules;
mod scaling;
mod stochastic_frequencies;
