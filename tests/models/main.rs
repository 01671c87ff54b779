//! Models, generation and text.

mod batches;
mod gguf;
mod real;
mod streams;
mod toy;
mod unequal;
