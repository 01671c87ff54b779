//! What every other room stands on: errors, plain data, loops over threads, vector code, and where time goes. No device, no cast.

pub mod activation;
pub(crate) mod check;
pub(crate) mod data;
pub(crate) mod error;
pub(crate) mod math;
pub mod parallel;
pub mod profile;
pub(crate) mod simd;
pub(crate) mod sync;
