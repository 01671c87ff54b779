//! Every family of FP8 checkpoints: what loads, and what is rejected.

mod damaged;
mod fp4;
mod golden;
mod refused;
mod spelled;
mod support;
