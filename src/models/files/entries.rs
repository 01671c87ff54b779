//! Entries of a `config.json`, each with an error that names it.

use super::json::ids;
use crate::models::error::{Error, Result};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// An object of a configuration file, with its path for error messages.
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

    pub(crate) fn object(&self, key: &str) -> Option<Entries<'a>> {
        self.get(key).map(|value| Entries {
            path: self.path.clone(),
            prefix: format!("{}{key}.", self.prefix),
            value,
        })
    }

    pub(crate) fn error(&self, key: &str, expected: impl Into<String>) -> Error {
        Error::Config {
            path: self.path.clone(),
            key: format!("{}{key}", self.prefix),
            value: self
                .get(key)
                .map_or("missing".to_string(), |value| value.to_string()),
            expected: expected.into(),
        }
    }

    fn or_default<T>(
        &self,
        key: &str,
        default: Option<T>,
        expected: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<T> {
        match self.get(key) {
            Some(value) => read(value).ok_or_else(|| self.error(key, expected)),
            None => default.ok_or_else(|| self.error(key, expected)),
        }
    }

    /// A size of at least 1.
    pub(crate) fn size(&self, key: &str, default: impl Into<Option<usize>>) -> Result<usize> {
        self.or_default(key, default.into(), "a size of at least 1", |value| {
            let size = value.as_u64().filter(|size| (1..MAX_SIZE).contains(size))?;
            usize::try_from(size).ok()
        })
    }

    /// A finite positive number.
    pub(crate) fn positive(&self, key: &str, default: impl Into<Option<f64>>) -> Result<f64> {
        self.or_default(key, default.into(), "a positive number", |value| {
            value.as_f64().filter(|x| x.is_finite() && *x > 0.)
        })
    }

    pub(crate) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        self.or_default(key, Some(default), "true or false", Value::as_bool)
    }

    pub(crate) fn text(&self, key: &str, default: impl Into<Option<&'a str>>) -> Result<String> {
        self.or_default(key, default.into().map(String::from), "a text", |value| {
            value.as_str().map(String::from)
        })
    }

    /// A list of positive numbers; None if there is no such entry.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let numbers = value.as_array().and_then(|list| {
            let number = |x: &Value| x.as_f64().filter(|x| x.is_finite() && *x > 0.);
            list.iter().map(number).collect::<Option<Vec<f64>>>()
        });
        numbers
            .map(Some)
            .ok_or_else(|| self.error(key, "a list of positive numbers"))
    }

    /// A token id or a list of them; empty if there is no such entry.
    pub(crate) fn token_ids(&self, key: &str) -> Result<Vec<u32>> {
        ids(&self.value[key]).ok_or_else(|| self.error(key, "a token id or a list of them"))
    }
}
