//! Transformer modules as one node of the graph, against their layers one by one; checkpointed functions; activations kept in FP8.

mod activations;
mod attention;
mod cached;
mod changed;
mod checkpointing;
mod dropout;
mod equal;
mod errors;
mod flows;
mod guards;
mod inference;
mod kept;
mod modules;
mod sharing;
mod state;
mod support;
