//! Training checkpoints: optimizers, what may differ when a run is resumed, open guards, Intel's flow.

mod ipex;
mod open_guard;
mod optimizers;
mod options;
