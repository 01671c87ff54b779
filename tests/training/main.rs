//! Training runs: the trainer, its files, and what training asks of a language model.

mod encoder;
mod encoder_refused;
mod errors;
mod language_model;
mod metrics;
mod resume;
mod support;
mod written;
