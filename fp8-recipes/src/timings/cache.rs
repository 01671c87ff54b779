//! The file of times.

use super::LayerTiming;
use crate::error::Result;
use fp8_files::atomic::{FileError, write_atomic};
use fp8_files::read::read_text_if_present;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, create_dir_all};
use std::path::{Path, PathBuf};

/// The first entry of a file of times; another number stands for another meaning of the rest.
const FORMAT: &str = "fp8 layer timings 1";
/// A cache of a few thousand cases has less than a tenth of it.
const MAX_BYTES: u64 = 8 << 20;

/// Times by machine and case.
pub(super) type Times = BTreeMap<String, BTreeMap<String, LayerTiming>>;

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Content {
    format: String,
    machines: Times,
}

/// The file in the user's folder for caches; None where the system has no such folder.
pub(super) fn default_path() -> Option<PathBuf> {
    Some(dirs::cache_dir()?.join("fp8").join("layer_timings.json"))
}

/// What the file holds; nothing if it does not exist.
///
/// # Errors
/// If it cannot be read, or is not a file of times.
pub(super) fn read(path: &Path) -> Result<Times, fp8_files::Error> {
    let Some(text) = read_text_if_present(path, MAX_BYTES)? else {
        return Ok(Times::new());
    };
    let malformed = |reason: String| fp8_files::Error::Json {
        path: path.to_path_buf(),
        what: "the file of layer timings",
        reason,
    };
    let content: Content = serde_json::from_str(&text).map_err(|e| malformed(e.to_string()))?;
    match content.format.as_str() {
        FORMAT => Ok(content.machines),
        other => Err(malformed(format!(
            "its format is `{other}`, expected `{FORMAT}`"
        ))),
    }
}

/// Adds a time to what the file holds by now: another process may have written since it was read.
///
/// # Errors
/// If the file cannot be read or written, or is not a file of times, which is left as it is.
pub(super) fn add(
    path: &Path,
    machine: &str,
    case: &str,
    timing: LayerTiming,
) -> Result<(), fp8_files::Error> {
    if let Some(folder) = path.parent() {
        create_dir_all(folder).map_err(FileError::io(folder, "create the directory"))?;
    }
    let mut lock = path.as_os_str().to_owned();
    lock.push(".lock");
    let lock = Path::new(&lock);
    let guard = File::create(lock).map_err(FileError::io(lock, "create the file"))?;
    // Some network file systems have no locks. Without one, a time that two processes write together may be lost, and nothing else:
    // a file is replaced as a whole.
    let _ = guard.lock();
    let mut machines = read(path)?;
    let cases = machines.entry(machine.to_string()).or_default();
    cases.insert(case.to_string(), timing);
    let content = Content {
        format: FORMAT.to_string(),
        machines,
    };
    let text = serde_json::to_vec_pretty(&content).map_err(std::io::Error::from);
    let text = text.map_err(FileError::io(path, "write"))?;
    write_atomic(path, |file| file.write_all(&text))?;
    Ok(())
}
