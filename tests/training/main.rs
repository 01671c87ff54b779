//! Training runs: the trainer, its files, and what training asks of a language model.

mod defaults;
mod device;
mod encoder;
mod encoder_refused;
mod errors;
mod language_model;
mod last_steps;
mod metrics;
mod resume;
mod skipped;
mod support;
mod written;
