//! The configuration beside an exported model.

use crate::FilesError;
use crate::error::{Result, json_error};
use crate::read::read_text;
use fp8_files::python_json;
use serde_json::{Map, Value};
use std::path::Path;

/// What a configuration is, for messages.
const ROOT: &str = "the object at its root";
/// A limit above the size of any configuration.
const MAX_CONFIG: u64 = 64 << 20;

/// The given entries, or those of the configuration file, with `quantization_config` inserted.
pub(super) fn merged(
    path: &Path,
    given: Option<&Map<String, Value>>,
    quantization: Value,
) -> Result<Value> {
    let mut config = match given {
        Some(given) => given.clone(),
        None => entries(path)?,
    };
    config.insert("quantization_config".into(), quantization);
    Ok(config.into())
}

/// The entries of the file; empty without a file.
fn entries(path: &Path) -> Result<Map<String, Value>> {
    match read_text(path, MAX_CONFIG) {
        Err(FilesError::Read { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            Ok(Map::new())
        }
        text => match python_json::parse(&text?) {
            Ok(Value::Object(entries)) => Ok(entries),
            Ok(_) => Err(json_error(path, ROOT, "there is another value")),
            Err(error) => Err(json_error(path, ROOT, error)),
        },
    }
}
