//! JSON files beside a model.

use crate::models::error::TextError;
use crate::read::{MAX_CONFIG, read_text_if_present};
use serde_json::Value;
use std::path::Path;

/// The content of a JSON file; None if there is no file.
pub(crate) fn read_json(path: &Path) -> Result<Option<Value>, TextError> {
    let Some(text) = read_text_if_present(path, MAX_CONFIG)? else {
        return Ok(None);
    };
    let json = serde_json::from_str(&text).map_err(|error| TextError::Json {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })?;
    Ok(Some(json))
}

/// One token id or a list of them; empty if the entry is missing or null.
pub(crate) fn token_ids(json: &Value, key: &str, path: &Path) -> Result<Vec<u32>, TextError> {
    ids(&json[key]).ok_or_else(|| TextError::Json {
        path: path.to_path_buf(),
        reason: format!("`{key}` is {}, expected numbers of tokens", json[key]),
    })
}

/// One id or a list of ids; empty for null, None for anything else.
pub(crate) fn ids(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| u32::try_from(value.as_u64()?).ok();
    match value {
        Value::Null => Some(vec![]),
        Value::Array(ids) => ids.iter().map(id).collect(),
        value => id(value).map(|id| vec![id]),
    }
}
