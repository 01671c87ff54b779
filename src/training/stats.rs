//! `stats.jsonl`: a line for each cast of a measured step.

use super::error::{Error, Result};
use crate::StatsReport;
use crate::atomic::write_atomic;
use crate::read::read_text_if_present;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;

/// The largest file that is read again, in bytes.
const LIMIT: u64 = 1 << 30;

/// Appends a line for each cast that a step of the run `name` has measured.
///
/// # Errors
/// If the file cannot be written.
pub fn append_stats(
    path: impl AsRef<Path>,
    name: &str,
    step: u64,
    stats: &StatsReport,
) -> Result<()> {
    let path = path.as_ref();
    let mut lines = String::new();
    for row in &stats.rows {
        let mut line = serde_json::json!(row);
        line["recipe"] = name.into();
        line["step"] = step.into();
        lines.push_str(&format!("{line}\n"));
    }
    let file = OpenOptions::new().create(true).append(true).open(path);
    file.and_then(|mut file| file.write_all(lines.as_bytes()))
        .map_err(Error::io(path, "append to it"))
}

/// Drops the lines that `keep` does not accept, by their run and step: those of steps that a resumed run will repeat. Does nothing if
/// there is no file.
///
/// # Errors
/// If the file cannot be read or written.
pub fn trim_stats(path: impl AsRef<Path>, keep: impl Fn(&str, u64) -> bool) -> Result<()> {
    let path = path.as_ref();
    let Some(old) = read_text_if_present(path, LIMIT)? else {
        return Ok(());
    };
    let kept = old.lines().filter(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let place = line["recipe"].as_str().zip(line["step"].as_u64());
        place.is_some_and(|(name, step)| keep(name, step))
    });
    Ok(write_atomic(path, |out| {
        kept.clone().try_for_each(|line| writeln!(out, "{line}"))
    })?)
}
