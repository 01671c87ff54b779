//! Rewrites of checkpoints: converted, quantized and dequantized, completely or not at all.

mod goldens;
mod helpers;
mod interrupted;
mod mixed;
mod quantized;
mod sharded;
mod streamed;
mod unusual;
