//! The model that is written.

use super::names::Architecture;
use crate::models::error::{Error, GgufError, Result};
use crate::models::families::Config;
use crate::rewrite::Source;
use serde_json::Value;
use std::fmt;
use std::path::PathBuf;

/// A source with its configuration.
pub(super) struct Described<'a> {
    pub(super) source: &'a dyn Source,
    pub(super) config: &'a Value,
    /// The file of the configuration, for messages.
    pub(super) path: PathBuf,
    pub(super) parsed: Config,
    pub(super) architecture: Architecture,
}

impl<'a> Described<'a> {
    pub(super) fn of(source: &'a dyn Source) -> Result<Self> {
        let directory = source.directory().unwrap_or_default();
        let Some(config) = source.config() else {
            return Err(fp8_files::Error::MissingConfig { path: directory }.into());
        };
        let path = directory.join("config.json");
        let parsed = Config::parse(&path, config)?;
        let text = config.get("text_config").unwrap_or(config);
        let kind = text.get("model_type").and_then(Value::as_str);
        let architecture = Architecture::of(kind.unwrap_or_default());
        let model = Self {
            source,
            config,
            architecture,
            parsed,
            path,
        };
        match &model.parsed {
            Config::Llama(config) if config.mla.is_some() => {
                let expected = "a model without latent attention";
                Err(model.unsupported("model_type", kind.unwrap_or_default(), expected))
            }
            _ => Ok(model),
        }
    }

    /// An error about an entry of the configuration.
    pub(super) fn unsupported(&self, key: &str, value: impl fmt::Display, expected: &str) -> Error {
        Error::Config {
            path: self.path.clone(),
            key: key.to_string(),
            value: value.to_string(),
            expected: format!("{expected}, which llama.cpp computes"),
        }
    }

    pub(super) fn unknown(&self, tensor: &str) -> Error {
        let error = GgufError::UnknownTensor {
            path: self.path.parent().unwrap_or(&self.path).to_path_buf(),
            tensor: tensor.to_string(),
            architecture: self.architecture.name(),
        };
        error.into()
    }
}
