//! Models, generation and text.

mod batches;
mod defaults;
mod entries;
mod gguf;
mod goldens;
mod latent;
mod outliers;
mod positions;
mod real;
mod retuning;
mod rollout;
mod search;
mod streams;
mod threads;
mod tokenizers;
mod toy;
mod unequal;
mod unread;
