//! Whether a checkpoint belongs to a run.

use super::super::error::{Error, Result};
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;

/// Fails if a setting of the checkpoint at `path` differs from that of this run. A setting that an earlier version did not have is null.
pub(super) fn fits(path: &Path, saved: &Value, now: &Value) -> Result<()> {
    // What else the checkpoint stores is not a setting.
    let keys = now.as_object().into_iter().flat_map(|now| now.keys());
    // Earlier versions stored the optimizer as a text; its settings come from the checkpoint anyway.
    let differs = keys
        .filter(|key| !(*key == "optimizer" && saved[key].is_string()))
        .find_map(|key| difference(key.clone(), &saved[key], &now[key]));
    let Some((key, saved, now)) = differs else {
        return Ok(());
    };
    Err(Error::OtherRun {
        path: path.to_path_buf(),
        key,
        saved: saved.to_string(),
        now: now.to_string(),
    })
}

/// The first setting within `key` that differs, and its values.
fn difference<'a>(
    key: String,
    saved: &'a Value,
    now: &'a Value,
) -> Option<(String, &'a Value, &'a Value)> {
    if saved == now {
        return None;
    }
    let (Value::Object(one), Value::Object(other)) = (saved, now) else {
        return Some((key, saved, now));
    };
    let inner: BTreeSet<&String> = one.keys().chain(other.keys()).collect();
    let mut inner = inner.into_iter();
    inner.find_map(|own| difference(format!("{key}.{own}"), &saved[own], &now[own]))
}
