//! The families of checkpoints: the names that each uses, and what its configuration declares about layers.

mod comfy;
mod compressed_tensors;
mod fbgemm;
mod fp8;
mod mistral;
mod mlx;
mod modelopt;
mod modules;
mod quark;
mod torchao;
mod unconfigured;
mod w8a8;

pub(super) use comfy::{is_comfy, parse as comfy};
pub(super) use compressed_tensors::parse as compressed_tensors;
pub(super) use fbgemm::parse as fbgemm;
pub(super) use fp8::parse as fp8;
pub(super) use mistral::{of_config as mistral_of_config, parse as mistral};
pub(super) use mlx::parse as mlx;
pub(super) use modelopt::parse as modelopt;
pub(super) use quark::parse as quark;
pub(super) use torchao::{is_torchao, parse as torchao};
pub(super) use unconfigured::{by_shape, plain_cast};
pub(super) use w8a8::parse as w8a8;
