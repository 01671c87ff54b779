//! Every family of FP8 checkpoints: what loads, and what is rejected.

mod damaged;
mod golden;
mod refused;
mod spelled;
mod support;
