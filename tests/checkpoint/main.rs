//! Training checkpoints: a resumed run continues bit for bit, and a checkpoint that does not fit changes nothing.

mod bit_for_bit;
mod file;
mod flows;
mod refused;
mod run;
