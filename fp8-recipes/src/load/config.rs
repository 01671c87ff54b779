//! The configuration beside the files: which family of checkpoints they are.

use super::by_shape::ByShape;
use super::compressed_tensors::CompressedTensors;
use super::family::{At, Family};
use super::fp8::Fp8;
use crate::error::{Error, Result};
use crate::read::read_text;
use serde_json::Value;
use std::path::Path;
use std::sync::Arc;

/// Longer than any configuration; a vocabulary is not in it.
const MAX_CONFIG: u64 = 64 << 20;

/// The family of the safetensors files in `directory`, by the `config.json` there.
pub(super) fn family_of(directory: &Path) -> Result<Arc<dyn Family>> {
    let path = directory.join("config.json");
    let text = match read_text(&path, MAX_CONFIG) {
        Err(Error::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Arc::new(ByShape));
        }
        read => read?,
    };
    let config: Value = serde_json::from_str(&text).map_err(|error| Error::Json {
        path: path.clone(),
        what: "the model's configuration",
        reason: error.to_string(),
    })?;
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
        return Ok(Arc::new(ByShape));
    };
    let at = At::new(&path, key, value);
    // Old files of compressed-tensors say so by the key alone.
    let method = at.get("quant_method");
    let name = match method.value {
        Value::Null if key == "compression_config" => "compressed-tensors",
        _ => method.text("compressed-tensors or fp8")?,
    };
    match name {
        "compressed-tensors" => Ok(Arc::new(CompressedTensors::parse(&at)?)),
        "fp8" => Ok(Arc::new(Fp8::parse(&at)?)),
        _ => Err(method.unsupported("compressed-tensors and fp8")),
    }
}
