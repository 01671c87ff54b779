//! The families of checkpoints: the names that each uses, and what its configuration declares about layers.

mod comfy;
mod compressed_tensors;
mod fbgemm;
mod fp8;
mod mistral;
mod mlx;
mod modelopt;
mod modules;
mod mxfp4;
mod quark;
mod torchao;
mod unconfigured;
mod w8a8;

use super::at::At;
use super::family::Family;
use crate::error::Result;
use crate::safetensors_file::SafetensorsFile;

pub(super) use comfy::{is_comfy, parse as comfy};
pub(super) use mistral::{of_config as mistral_of_config, parse as mistral};
pub(super) use modelopt::{
    EXCLUDED as MODELOPT_EXCLUDED, entries as modelopt_entries, lacks_layers, parse as modelopt,
};
pub(super) use modules::Modules;
pub(super) use torchao::{is_torchao, parse as torchao};
pub(super) use unconfigured::{INPUT_SCALES, WEIGHT_SCALES, by_shape, plain_cast, unknown};

/// Reads a family from its configuration, the files beside it, and ModelOpt's second configuration.
type Parse = fn(&At<'_>, &[&SafetensorsFile], Option<&At<'_>>) -> Result<Family>;

/// The families that a configuration names, by their `quant_method`.
const METHODS: &[(&str, Parse)] = &[
    ("compressed-tensors", |at, _, _| {
        compressed_tensors::parse(at)
    }),
    ("fp8", |at, files, _| fp8::parse(at, files)),
    ("mxfp8", |at, files, _| fp8::parse(at, files)),
    ("mxfp4", |at, _, _| mxfp4::parse(at)),
    ("modelopt", |at, _, second| modelopt(at, second)),
    ("modelopt_fp8", |at, _, second| modelopt(at, second)),
    ("modelopt_mxfp8", |at, _, second| modelopt(at, second)),
    ("modelopt_fp4", |at, _, second| modelopt(at, second)),
    ("modelopt_mixed", |at, _, second| modelopt(at, second)),
    ("fbgemm_fp8", |at, _, _| fbgemm::parse(at)),
    ("torchao", |at, files, _| torchao(Some(at), files)),
    ("quark", |at, _, _| quark::parse(at)),
    ("w8a8_fp8", |at, _, _| w8a8::parse(at)),
    ("mlx", |at, files, _| mlx::parse(at, files)),
];

/// The family of the configuration `at`. Its `quant_method` decides; `implied` is what other entries say where there is none. `second` is
/// ModelOpt's other file, if `at` [lacks its list](lacks_layers).
///
/// # Errors
/// [`Error::UnsupportedScheme`](crate::Error::UnsupportedScheme) if no family has this name, or with the value that a family cannot read.
pub(super) fn of_method(
    at: &At<'_>,
    implied: Option<&str>,
    files: &[&SafetensorsFile],
    second: Option<&At<'_>>,
) -> Result<Family> {
    let method = at.get("quant_method");
    let unknown = || {
        let names: Vec<_> = METHODS.iter().map(|(name, _)| *name).collect();
        method.unsupported(&format!("one of {}", names.join(", ")))
    };
    let name = match implied {
        Some(name) if method.is_null() => name,
        _ => method.value.as_str().ok_or_else(unknown)?,
    };
    let known = METHODS.iter().find(|(known, _)| *known == name);
    let (_, parse) = known.ok_or_else(unknown)?;
    parse(at, files, second)
}
