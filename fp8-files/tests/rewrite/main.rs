//! Rewrites of checkpoints: converted, quantized and dequantized, completely or not at all.

mod goldens;
mod helpers;
mod interrupted;
mod lists;
mod mixed;
mod quantized;
mod raw;
mod sharded;
mod streamed;
mod tables;
mod tokens;
mod unusual;
