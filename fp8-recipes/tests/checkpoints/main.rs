//! Training checkpoints: optimizers, what may differ when a run is resumed, Intel's flow.

mod ipex;
mod optimizers;
mod options;
