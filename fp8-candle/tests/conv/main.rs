//! Convolutions in FP8 against their definition in f64.

mod calls;
mod errors;
mod fidelity;
mod granularity;
mod reference;
