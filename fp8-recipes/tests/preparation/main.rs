//! Models made ready for FP8: how they show their layers, the choice by measured times, post-training quantization, the emulator,
//! errors of layers.

mod auto;
mod auto_file;
mod emulator;
mod errors;
mod module;
mod ptq;
