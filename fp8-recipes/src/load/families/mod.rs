//! The families of checkpoints: what each calls things, and what its configuration says of layers.

mod by_shape;
mod compressed_tensors;
mod fp8;
mod modules;

pub(super) use by_shape::ByShape;
pub(super) use compressed_tensors::CompressedTensors;
pub(super) use fp8::Fp8;
