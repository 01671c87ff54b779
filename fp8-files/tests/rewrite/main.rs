//! Checkpoints rewritten: the same numbers in another spelling, quantized, dequantized; whole or not at all.

mod goldens;
mod helpers;
mod interrupted;
mod quantized;
mod sharded;
