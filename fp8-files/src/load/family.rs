//! What every family of checkpoints supplies, and values of its configuration with the place where they stand.

use super::family_name::FamilyName;
use crate::error::{Error, Result};
use crate::scheme::LayerScheme;
use serde_json::Value;
use std::fmt::Debug;
use std::path::{Path, PathBuf};

/// Rows of a tensor in the file and of the tensor that models ask for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// The same.
    AsStored,
    /// The two halves of each head's rotation alternate in the file and follow each other in the model.
    Rotary {
        /// Heads that share the rows.
        heads: usize,
    },
}

/// Where a family keeps the elements of a scale tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleLayout {
    /// Row after row.
    RowMajor,
    /// In tiles of 128x4, as cuBLAS reads them.
    Tiles,
}

/// What a family of checkpoints says of its names and layers; checks are made by the catalogue, the same for all. One file
/// of the folder `families` for each.
pub(super) trait Family: Debug + Send + Sync {
    /// Which family it is.
    fn name(&self) -> FamilyName;

    /// How the layer at `path` is stored; None if the configuration leaves it in high precision.
    fn layer(&self, path: &str) -> Result<Option<LayerScheme>>;

    /// The configuration, for messages; None if there is none.
    fn source(&self) -> Option<&Path>;

    /// What the family calls `weight_scale`.
    fn weight_scale_names(&self) -> &'static [&'static str] {
        &["weight_scale"]
    }

    /// What the family calls `input_scale`.
    fn input_scale_names(&self) -> &'static [&'static str] {
        &["input_scale"]
    }

    /// The path that models know, for one that stands in the file, and the order of its rows.
    fn rename(&self, name: &str) -> (String, Order) {
        (name.to_string(), Order::AsStored)
    }

    /// How the scales of the layer at `path` are laid out.
    fn scale_layout(&self, _path: &str) -> ScaleLayout {
        ScaleLayout::RowMajor
    }

    /// Whether a stored tensor describes others and has no value of its own.
    fn is_description(&self, _name: &str) -> bool {
        false
    }

    /// Whether U32 weights are words of four codes.
    fn packs_words(&self) -> bool {
        false
    }

    /// Whether FP8 tensors are their own values, so that no scale is missed.
    fn is_unscaled(&self) -> bool {
        false
    }

    /// Whether scales of inputs may stand in the file that nothing uses.
    fn may_ignore_input_scales(&self) -> bool {
        false
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
    /// The value of the entry `key` of the file at `path`.
    pub(super) fn new(path: &'a Path, key: &str, value: &'a Value) -> Self {
        Self {
            path,
            key: key.to_string(),
            value,
        }
    }

    /// An entry; null if there is none.
    pub(super) fn get(&self, key: &str) -> At<'a> {
        static NULL: Value = Value::Null;
        At {
            path: self.path,
            key: match self.key.as_str() {
                "" => key.to_string(),
                outer => format!("{outer}.{key}"),
            },
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

    /// All entries of an object and their keys; none of null.
    pub(super) fn named_entries(&self) -> Result<Vec<(&'a str, At<'a>)>> {
        match self.value {
            Value::Null => Ok(vec![]),
            Value::Object(map) => {
                let entries = map.keys().map(|key| (key.as_str(), self.get(key)));
                Ok(entries.collect())
            }
            _ => Err(self.unsupported("an object")),
        }
    }

    /// A positive number of f32; None of null.
    pub(super) fn positive(&self) -> Result<Option<f32>> {
        if self.is_null() {
            return Ok(None);
        }
        let number = self.value.as_f64().map(|number| number as f32);
        match number.filter(|number| number.is_normal() && *number > 0.) {
            Some(number) => Ok(Some(number)),
            None => Err(self.unsupported("null or a positive number")),
        }
    }

    /// A positive count.
    pub(super) fn count(&self) -> Result<usize> {
        let count = self
            .value
            .as_u64()
            .and_then(|count| u32::try_from(count).ok());
        match count.filter(|count| *count > 0) {
            Some(count) => Ok(count as usize),
            None => Err(self.unsupported("a positive count")),
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

    /// Where the value stands in its file.
    pub(super) fn key(&self) -> &str {
        &self.key
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
