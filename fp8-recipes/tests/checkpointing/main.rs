//! Checkpointed functions: to the bit what they are without checkpoints.

mod errors;
mod flows;
mod harness;
mod same;
