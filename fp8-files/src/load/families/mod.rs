//! The families of checkpoints: what each calls things, and what its configuration says of layers.

mod by_shape;
mod comfy;
mod compressed_tensors;
mod fbgemm;
mod fp8;
mod mistral;
mod mlx;
mod modelopt;
mod modules;
mod plain;
mod quark;
mod torchao;
mod w8a8;

pub(super) use by_shape::ByShape;
pub(super) use comfy::{Comfy, is_comfy};
pub(super) use compressed_tensors::CompressedTensors;
pub(super) use fbgemm::Fbgemm;
pub(super) use fp8::Fp8;
pub(super) use mistral::Mistral;
pub(super) use mlx::Mlx;
pub(super) use modelopt::ModelOpt;
pub(super) use plain::PlainCast;
pub(super) use quark::Quark;
pub(super) use torchao::{Torchao, is_torchao};
pub(super) use w8a8::W8a8;
