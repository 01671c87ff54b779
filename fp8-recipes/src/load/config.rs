//! The configuration beside the files: which family of checkpoints they are.

use super::families::{ByShape, CompressedTensors, Fp8};
use super::family::{At, Family};
use super::options::OpenOptions;
use crate::error::{Error, Result};
use crate::read::read_text;
use crate::safetensors_file::SafetensorsFile;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Longer than any configuration; a vocabulary is not in it.
const MAX_CONFIG: u64 = 64 << 20;

/// What stands beside the files of a directory.
#[derive(Debug)]
pub(super) struct Configuration {
    pub(super) family: Arc<dyn Family>,
    /// `config.json`.
    pub(super) config: Option<Value>,
}

/// The configuration of `files`, which are those of the model in `directory`.
pub(super) fn configuration(
    directory: &Path,
    files: &[&SafetensorsFile],
    options: &OpenOptions,
) -> Result<Configuration> {
    let path = directory.join("config.json");
    let config = json(&path)?;
    let family = match &config {
        Some(config) => of_config(&path, config, files)?,
        None => None,
    };
    let _ = options;
    let family = family.unwrap_or_else(|| Arc::new(ByShape));
    Ok(Configuration { family, config })
}

/// A JSON file; None if there is none.
fn json(path: &Path) -> Result<Option<Value>> {
    let text = match read_text(path, MAX_CONFIG) {
        Err(Error::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(None);
        }
        read => read?,
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
    ];
    let found = places
        .into_iter()
        .find_map(|(key, value)| Some((key, value.filter(|value| !value.is_null())?)));
    let Some((key, value)) = found else {
        return Ok(None);
    };
    let at = At::new(path, key, value);
    // Old files of compressed-tensors say so by the key alone.
    let method = at.get("quant_method");
    let name = match method.value {
        Value::Null if key == "compression_config" => "compressed-tensors",
        _ => method.text(METHODS)?,
    };
    let ends_with = |end: &str| files.iter().any(|file| file.names().any(|name| name.ends_with(end)));
    Ok(Some(match name {
        "compressed-tensors" => Arc::new(CompressedTensors::parse(&at)?),
        "fp8" | "mxfp8" => Arc::new(Fp8::parse(&at, ends_with(".weight_scale_inv"))?),
        _ => return Err(method.unsupported(METHODS)),
    }))
}

const METHODS: &str = "compressed-tensors, fp8, mxfp8";
