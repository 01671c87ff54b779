//! The file of `--json`.

use anyhow::{Result, ensure};
use fp8::atomic::write_atomic;
use serde::Serialize;
use std::path::Path;

/// Fails at once if [`write_json`] would fail after minutes.
pub fn check_target(path: &Path) -> Result<()> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    ensure!(
        folder.is_dir() && !path.is_dir(),
        "--json {}: not a file in an existing folder",
        path.display()
    );
    Ok(())
}

/// Replaces the file with the array; a reader finds the whole array or the old file.
pub fn write_json(path: &Path, rows: &[impl Serialize]) -> Result<()> {
    Ok(write_atomic(path, |out| {
        serde_json::to_writer_pretty(&mut *out, rows)?;
        writeln!(out)
    })?)
}
