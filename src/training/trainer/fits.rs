//! Whether a checkpoint belongs to a run.

use super::super::error::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// Fails if a setting of the checkpoint at `path` differs from that of this run.
pub(super) fn fits(path: &Path, saved: &Value, now: &Value) -> Result<()> {
    let keys = now.as_object().into_iter().flat_map(|now| now.keys());
    for key in keys {
        if saved.get(key) != now.get(key) {
            let show = |value: Option<&Value>| value.map_or("missing".into(), Value::to_string);
            return Err(Error::OtherRun {
                path: path.to_path_buf(),
                key: key.clone(),
                saved: show(saved.get(key)),
                now: show(now.get(key)),
            });
        }
    }
    Ok(())
}
