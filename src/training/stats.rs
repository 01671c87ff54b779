//! `stats.jsonl`: a line for each cast of a measured step.

use super::error::{Error, Result};
use super::lines::readable;
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

/// What a line says besides its statistics.
#[derive(serde::Deserialize)]
struct Place {
    recipe: String,
    step: u64,
}

/// Drops the lines that `keep` does not accept, by their run and step: those of steps that a resumed run will repeat. Does nothing if
/// there is no file. Lines that cannot be read are treated as [`Metrics::open`](super::Metrics::open) does.
///
/// # Errors
/// If the file cannot be read or written.
pub fn trim_stats(path: impl AsRef<Path>, keep: impl Fn(&str, u64) -> bool) -> Result<()> {
    let path = path.as_ref();
    let Some(old) = read_text_if_present(path, LIMIT)? else {
        return Ok(());
    };
    let placed = |line: &str| {
        let place: Place = serde_json::from_str(line)?;
        Ok::<_, serde_json::Error>((place, line.to_string()))
    };
    let mut kept = readable(path, &old, placed);
    kept.retain(|(place, _)| keep(&place.recipe, place.step));
    Ok(write_atomic(path, |out| {
        (kept.iter()).try_for_each(|(_, line)| writeln!(out, "{line}"))
    })?)
}
