//! Convolutions in FP8 against their definition in f64.

mod as_linear;
mod calls;
mod casts;
mod errors;
mod fidelity;
mod granularity;
mod reference;
