//! Every family of FP8 checkpoints: what is read from it, and what is refused.

mod damaged;
mod golden;
mod refused;
mod spelled;
mod support;
