//! Models made ready for FP8: how they show their layers, post-training quantization, the emulator, errors of layers.

mod emulator;
mod errors;
mod module;
mod ptq;
