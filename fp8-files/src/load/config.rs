//! The configuration beside the files: which family of checkpoints they are.

use super::families::{
    ByShape, Comfy, CompressedTensors, Fbgemm, Fp8, Mistral, Mlx, ModelOpt, PlainCast, Quark,
    Torchao, W8a8, is_comfy, is_torchao,
};
use super::family::{At, Family};
use super::options::OpenOptions;
use crate::error::{Error, Result};
use crate::names::split;
use crate::read::{MAX_CONFIG, read_text_if_present};
use crate::safetensors_file::SafetensorsFile;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// What stands beside the files of a directory.
#[derive(Debug)]
pub(super) struct Configuration {
    pub(super) family: Arc<dyn Family>,
    /// `config.json`.
    pub(super) config: Option<Value>,
    /// Mistral's `params.json`, if the files are Mistral's own.
    pub(super) params: Option<Value>,
}

/// The `config.json` of `directory`, if there is one.
pub(super) fn read(directory: &Path) -> Result<Option<Value>> {
    json(&directory.join("config.json"))
}

impl Configuration {
    /// The configuration of `files`, which are those of the model in `directory`, beside `config`.
    pub(super) fn new(
        directory: &Path,
        config: Option<Value>,
        files: &[&SafetensorsFile],
        options: &OpenOptions,
    ) -> Result<Self> {
        let path = directory.join("config.json");
        let (family, params) = match native(directory, &path, config.as_ref(), files)? {
            Some((family, params)) => (family, params),
            None => {
                let family = family_of(directory, &path, config.as_ref(), files, options)?;
                (family, None)
            }
        };
        Ok(Self {
            family,
            config,
            params,
        })
    }
}

/// The configuration decides, then metadata, then names.
fn family_of(
    directory: &Path,
    path: &Path,
    config: Option<&Value>,
    files: &[&SafetensorsFile],
    options: &OpenOptions,
) -> Result<Arc<dyn Family>> {
    let told = match config {
        Some(config) => of_config(path, config, files)?,
        None => None,
    };
    if let Some(family) = told {
        return Ok(family);
    }
    let path = directory.join("hf_quant_config.json");
    if let Some(config) = json(&path)? {
        return Ok(Arc::new(ModelOpt::parse(&At::new(&path, "", &config))?));
    }
    Ok(if is_torchao(files) {
        Arc::new(Torchao::parse(None, files)?)
    } else if is_comfy(files) {
        Arc::new(Comfy::parse(files)?)
    } else if options.allow_unscaled && !any_name(files, is_scale) {
        Arc::new(PlainCast)
    } else {
        Arc::new(ByShape)
    })
}

fn any_name(files: &[&SafetensorsFile], fits: impl Fn(&str) -> bool) -> bool {
    files
        .iter()
        .any(|file| file.names().any(|name| fits(&name)))
}

/// Whether a tensor is a scale of something in FP8, whoever has written it. A norm's own `scale` is none.
fn is_scale(name: &str) -> bool {
    let own = split(name).1;
    let ends = [
        "_scale",
        "_scale_inv",
        "scale_weight",
        "scale_input",
        "scales",
        "qscale_act",
    ];
    ends.iter().any(|end| own.ends_with(end)) || own.contains("qscale")
}

/// The family of Mistral's own files, and `params.json` if there is one.
type Native = (Arc<dyn Family>, Option<Value>);

/// Mistral's own files, by their names: a `quantization_config` beside them speaks of other files. The counts of heads may
/// stand in `config.json` alone.
fn native(
    directory: &Path,
    path: &Path,
    config: Option<&Value>,
    files: &[&SafetensorsFile],
) -> Result<Option<Native>> {
    let has_scales = any_name(files, |name| name.ends_with(".qscale_weight"));
    if !has_scales && !any_name(files, |name| name == "tok_embeddings.weight") {
        return Ok(None);
    }
    let own = directory.join("params.json");
    if let Some(params) = json(&own)? {
        let family = Mistral::parse(&At::new(&own, "", &params))?;
        return Ok(Some((Arc::new(family), Some(params))));
    }
    match config {
        Some(config) => {
            let family = Mistral::of_config(&At::new(path, "", config), has_scales)?;
            Ok(Some((Arc::new(family), None)))
        }
        None if has_scales => Err(Error::NoCheckpoint {
            path: directory.to_path_buf(),
            reason: "expected params.json beside the scales named `qscale_weight`".into(),
        }),
        None => Ok(None),
    }
}

/// A JSON file; None if there is none.
fn json(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read_text_if_present(path, MAX_CONFIG)? else {
        return Ok(None);
    };
    let value = serde_json::from_str(&text).map_err(|error| Error::Json {
        path: path.to_path_buf(),
        what: "the model's configuration",
        reason: error.to_string(),
    })?;
    Ok(Some(value))
}

/// The family that `config.json` names; None if it says nothing of a quantization.
fn of_config(
    path: &Path,
    config: &Value,
    files: &[&SafetensorsFile],
) -> Result<Option<Arc<dyn Family>>> {
    let places = [
        ("quantization_config", config.get("quantization_config")),
        (
            "text_config.quantization_config",
            config.pointer("/text_config/quantization_config"),
        ),
        ("compression_config", config.get("compression_config")),
        ("quantization", config.get("quantization")),
    ];
    let found = places
        .into_iter()
        .find_map(|(key, value)| Some((key, value.filter(|value| !value.is_null())?)));
    let Some((key, value)) = found else {
        return Ok(None);
    };
    let at = At::new(path, key, value);
    let method = at.get("quant_method");
    // Old files of compressed-tensors say so by the key alone, some of ModelOpt by who made them, MLX by the mode.
    let name = match method.value {
        Value::Null if key == "compression_config" => "compressed-tensors",
        Value::Null if is_modelopt(&at) => "modelopt",
        Value::Null if !at.get("mode").is_null() => "mlx",
        _ => method.text(METHODS)?,
    };
    Ok(Some(match name {
        "compressed-tensors" => Arc::new(CompressedTensors::parse(&at)?),
        "fp8" | "mxfp8" => {
            let inverse = any_name(files, |name| name.ends_with(".weight_scale_inv"));
            Arc::new(Fp8::parse(&at, inverse)?)
        }
        "modelopt" | "modelopt_fp8" | "modelopt_mxfp8" | "modelopt_mixed" => {
            Arc::new(ModelOpt::parse(&at)?)
        }
        "fbgemm_fp8" => Arc::new(Fbgemm::parse(&at)?),
        "torchao" => Arc::new(Torchao::parse(Some(&at), files)?),
        "quark" => Arc::new(Quark::parse(&at)?),
        "w8a8_fp8" => Arc::new(W8a8::parse(&at)?),
        "mlx" => Arc::new(Mlx::parse(&at, files)?),
        _ => return Err(method.unsupported(METHODS)),
    }))
}

fn is_modelopt(at: &At<'_>) -> bool {
    let has_algo = |at: &At<'_>| !at.get("quant_algo").is_null();
    at.get("producer").get("name").value == "modelopt"
        || has_algo(at)
        || has_algo(&at.get("quantization"))
}

const METHODS: &str = "compressed-tensors, fp8, mxfp8, modelopt, fbgemm_fp8, torchao, quark, w8a8_fp8 or mode mxfp8 of MLX";
