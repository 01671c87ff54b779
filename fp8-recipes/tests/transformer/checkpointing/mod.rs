//! Checkpointed functions compute the same bits as without checkpoints.

mod errors;
mod flows;
mod harness;
mod same;
