//! Values of a configuration, each with its file and keys for error messages.

use crate::error::{Error, Result};
use crate::python_json;
use fancy_regex::Regex;
use fp8_core::Granularity;
use serde_json::Value;
use std::path::Path;

/// A value in a configuration file, with its place.
#[derive(Debug, Clone)]
pub(crate) struct At<'a> {
    pub(crate) path: &'a Path,
    /// The keys that lead to the value, with dots between them.
    pub(crate) key: String,
    pub(crate) value: &'a Value,
}

impl<'a> At<'a> {
    /// The value of the entry `key` of the file at `path`.
    pub(crate) fn new(path: &'a Path, key: &str, value: &'a Value) -> Self {
        let key = key.to_string();
        Self { path, key, value }
    }

    /// An entry; null if there is none.
    pub(crate) fn get(&self, key: &str) -> At<'a> {
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

    /// All entries of an object with their keys; none for null.
    pub(crate) fn entries(&self) -> Result<Vec<(&'a str, At<'a>)>> {
        match self.value {
            Value::Null => Ok(vec![]),
            Value::Object(map) => {
                let entries = map.keys().map(|key| (key.as_str(), self.get(key)));
                Ok(entries.collect())
            }
            _ => Err(self.unsupported("an object")),
        }
    }

    /// A positive f32; None for null.
    pub(crate) fn positive(&self) -> Result<Option<f32>> {
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
    pub(crate) fn count(&self) -> Result<usize> {
        let count = self.size().filter(|count| *count > 0);
        count.ok_or_else(|| self.unsupported("a positive count"))
    }

    /// A size that a tensor may have; None for any other value.
    pub(crate) fn size(&self) -> Option<usize> {
        size(self.value)
    }

    /// `[rows, cols]`; None for null.
    pub(crate) fn block_sizes(&self) -> Result<Option<(usize, usize)>> {
        if self.is_null() {
            return Ok(None);
        }
        let sizes: Option<Vec<usize>> = match self.value {
            Value::Array(sizes) => sizes.iter().map(size).collect(),
            // The spelling of old compressed-tensors files.
            Value::String(text) => text.split('x').map(|size| size.parse().ok()).collect(),
            _ => None,
        };
        match sizes.as_deref() {
            Some(&[rows, cols]) if rows > 0 && cols > 0 => Ok(Some((rows, cols))),
            _ => Err(self.unsupported("null or [rows, cols]")),
        }
    }

    /// The blocks of a strategy that needs block sizes.
    pub(crate) fn blocks(&self) -> Result<Granularity> {
        match self.block_sizes()? {
            Some((rows, cols)) => Ok(Granularity::Blockwise { rows, cols }),
            None => Err(self.unsupported("[rows, cols]")),
        }
    }

    /// A regular expression in this list, anchored at the start as Python's `re.match` does. It may end anywhere.
    pub(crate) fn pattern(&self, pattern: &str) -> Result<Regex> {
        Regex::new(&format!("^(?:{pattern})"))
            .map_err(|error| self.unsupported(&format!("a pattern ({error})")))
    }

    /// The texts of a list; none for null.
    pub(crate) fn texts(&self) -> Result<Vec<&'a str>> {
        match self.value {
            Value::Null => Ok(vec![]),
            Value::Array(items) => items
                .iter()
                .map(|item| item.as_str().ok_or_else(|| self.unsupported("texts")))
                .collect(),
            _ => Err(self.unsupported("a list of texts")),
        }
    }

    /// A text.
    pub(crate) fn text(&self, expected: &str) -> Result<&'a str> {
        let text = self.value.as_str();
        text.ok_or_else(|| self.unsupported(expected))
    }

    pub(crate) fn is_null(&self) -> bool {
        self.value.is_null()
    }

    /// Fails unless the value is one of the list `allowed`.
    pub(crate) fn must_be(&self, allowed: Value) -> Result<()> {
        let allowed = allowed.as_array().map_or(&[][..], Vec::as_slice);
        if allowed.contains(self.value) {
            return Ok(());
        }
        let allowed: Vec<_> = allowed.iter().map(Value::to_string).collect();
        Err(self.unsupported(&allowed.join(" or ")))
    }

    /// The error for a value other than `expected`.
    pub(crate) fn unsupported(&self, expected: &str) -> Error {
        const LONG: usize = 200;
        let mut value = python_json::to_text(self.value);
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

fn size(value: &Value) -> Option<usize> {
    let size = u32::try_from(value.as_u64()?).ok()?;
    Some(size as usize)
}
