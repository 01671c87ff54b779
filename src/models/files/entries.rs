//! JSON files beside a model, and their entries, each with an error that names it.

use crate::models::error::{Error, Result};
use crate::read::{MAX_CONFIG, read_text_if_present};
use fp8_files::python_json;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// The content of a JSON file; None if there is no file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read_text_if_present(path, MAX_CONFIG)? else {
        return Ok(None);
    };
    let json = python_json::parse(&text).map_err(|error| crate::FilesError::Json {
        path: path.to_path_buf(),
        what: "the JSON",
        reason: error.to_string(),
    })?;
    Ok(Some(json))
}

/// An object of a JSON file, with its path for error messages.
#[derive(Debug, Clone)]
pub(crate) struct Entries<'a> {
    path: PathBuf,
    prefix: String,
    value: &'a Value,
}

/// Larger than any size in a model; products of two such sizes fit in 64 bits.
const MAX_SIZE: u64 = 1 << 31;

impl<'a> Entries<'a> {
    pub(crate) fn new(path: &Path, value: &'a Value) -> Self {
        Self {
            path: path.to_path_buf(),
            prefix: String::new(),
            value,
        }
    }

    pub(crate) fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|value| !value.is_null())
    }

    /// Whether there is no such entry; one that is null is there.
    pub(crate) fn is_absent(&self, key: &str) -> bool {
        self.value.get(key).is_none()
    }

    pub(crate) fn object(&self, key: &str) -> Option<Entries<'a>> {
        self.get(key).map(|value| Entries {
            path: self.path.clone(),
            prefix: format!("{}{key}.", self.prefix),
            value,
        })
    }

    /// The name of an entry in the file.
    pub(crate) fn name(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub(crate) fn error(&self, key: &str, expected: impl Into<String>) -> Error {
        let value = self.get(key).map(python_json::to_text);
        Error::Config {
            path: self.path.clone(),
            key: self.name(key),
            value: value.unwrap_or("missing".to_string()),
            expected: expected.into(),
        }
    }

    /// An entry as `read` understands it; None if it is missing or null.
    pub(crate) fn read<T>(
        &self,
        key: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        match self.get(key).map(read) {
            Some(None) => Err(self.error(key, expected)),
            found => Ok(found.flatten()),
        }
    }

    fn or_default<T>(
        &self,
        key: &str,
        default: Option<T>,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T> {
        let value = self.read(key, expected, read)?.or(default);
        value.ok_or_else(|| self.error(key, expected))
    }

    /// A size of at least 1.
    pub(crate) fn size(&self, key: &str, default: impl Into<Option<usize>>) -> Result<usize> {
        self.or_default(key, default.into(), "a size of at least 1", |value| {
            let size = value.as_u64().filter(|size| (1..MAX_SIZE).contains(size))?;
            usize::try_from(size).ok()
        })
    }

    /// A size from 1 to `most`.
    pub(crate) fn size_up_to(
        &self,
        most: usize,
        key: &str,
        default: impl Into<Option<usize>>,
    ) -> Result<usize> {
        match self.size(key, default)? {
            size if size <= most => Ok(size),
            _ => Err(self.error(key, format!("at most {most}"))),
        }
    }

    /// A whole number, which may be 0.
    pub(crate) fn count(&self, key: &str) -> Result<Option<usize>> {
        let count = |value: &Value| usize::try_from(value.as_u64()?).ok();
        self.read(key, "a whole number", count)
    }

    /// A finite positive number.
    pub(crate) fn positive(&self, key: &str, default: impl Into<Option<f64>>) -> Result<f64> {
        self.or_default(key, default.into(), "a positive number", positive)
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        self.or_default(key, Some(default), "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str, default: impl Into<Option<&'a str>>) -> Result<&'a str> {
        self.or_default(key, default.into(), "a text", Value::as_str)
    }

    /// Rejects an entry with another value than `only`.
    pub(crate) fn only(&self, key: &str, only: impl Into<Value>) -> Result<()> {
        let only = only.into();
        match (self.get(key), &only) {
            (Some(value), only) if value != only => {
                let expected = only.as_str().map(String::from);
                Err(self.error(key, expected.unwrap_or(only.to_string())))
            }
            _ => Ok(()),
        }
    }

    /// A list of positive numbers.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        self.read(key, "a list of positive numbers", |value| {
            value.as_array()?.iter().map(positive).collect()
        })
    }

    /// A token id or a list of them; empty if there is no such entry.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
        let ids = self.read(key, "a token id or a list of them", |value| match value {
            Value::Array(ids) => ids.iter().map(id).collect(),
            value => id(value).map(|id| vec![id]),
        });
        Ok(ids?.unwrap_or_default())
    }
}

fn positive(value: &Value) -> Option<f64> {
    value.as_f64().filter(|x| x.is_finite() && *x > 0.)
}
