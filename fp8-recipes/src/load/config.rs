//! The configuration beside the files: which family of checkpoints they are.

use super::by_shape::ByShape;
use super::compressed_tensors::CompressedTensors;
use super::fp8::Fp8;
use super::scheme::LayerScheme;
use crate::error::{Error, Result};
use crate::read::read_text;
use serde_json::Value;
use std::fmt::Debug;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Longer than any configuration; a vocabulary is not in it.
const MAX_CONFIG: u64 = 64 << 20;

/// What a family of checkpoints says of its layers. One file of this folder for each.
pub(super) trait Family: Debug + Send + Sync {
    /// How the layer at `path` is stored; None if the configuration leaves it in high precision.
    fn layer(&self, path: &str) -> Result<Option<LayerScheme>>;

    /// What the family calls `weight_scale`, in the order of preference.
    fn weight_scale_names(&self) -> &'static [&'static str] {
        &["weight_scale"]
    }

    /// What the family calls `input_scale`, in the order of preference.
    fn input_scale_names(&self) -> &'static [&'static str] {
        &["input_scale"]
    }

    /// The configuration, for messages; None if there is none.
    fn source(&self) -> Option<&Path>;
}

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
    let at = At {
        path: &path,
        key: key.to_string(),
        value,
    };
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

/// A value in a configuration file and where it stands.
#[derive(Debug, Clone)]
pub(super) struct At<'a> {
    path: &'a Path,
    key: String,
    pub(super) value: &'a Value,
}

impl<'a> At<'a> {
    /// An entry; null if there is none.
    pub(super) fn get(&self, key: &str) -> At<'a> {
        static NULL: Value = Value::Null;
        At {
            path: self.path,
            key: format!("{}.{key}", self.key),
            value: self.value.get(key).unwrap_or(&NULL),
        }
    }

    /// All entries of an object; none of null.
    pub(super) fn entries(&self) -> Result<Vec<At<'a>>> {
        match self.value {
            Value::Null => Ok(vec![]),
            Value::Object(map) => Ok(map.keys().map(|key| self.get(key)).collect()),
            _ => Err(self.unsupported("an object")),
        }
    }

    /// The texts of a list; none of null.
    pub(super) fn texts(&self) -> Result<Vec<&'a str>> {
        match self.value {
            Value::Null => Ok(vec![]),
            Value::Array(items) => items
                .iter()
                .map(|item| item.as_str().ok_or_else(|| self.unsupported("texts")))
                .collect(),
            _ => Err(self.unsupported("a list of texts")),
        }
    }

    pub(super) fn text(&self, expected: &str) -> Result<&'a str> {
        self.value
            .as_str()
            .ok_or_else(|| self.unsupported(expected))
    }

    pub(super) fn is_null(&self) -> bool {
        self.value.is_null()
    }

    pub(super) fn file(&self) -> PathBuf {
        self.path.to_path_buf()
    }

    /// Fails unless the value is one of `allowed`.
    pub(super) fn must_be(&self, allowed: &[Value]) -> Result<()> {
        if allowed.contains(self.value) {
            return Ok(());
        }
        let allowed: Vec<_> = allowed.iter().map(Value::to_string).collect();
        Err(self.unsupported(&allowed.join(" or ")))
    }

    /// The error for a value that is something else than `expected`.
    pub(super) fn unsupported(&self, expected: &str) -> Error {
        const LONG: usize = 200;
        let mut value = self.value.to_string();
        if value.len() > LONG {
            value = value.chars().take(LONG).chain("..".chars()).collect();
        }
        Error::UnsupportedScheme {
            path: self.path.to_path_buf(),
            key: self.key.clone(),
            value,
            expected: expected.to_string(),
        }
    }
}
