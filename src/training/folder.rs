//! The folder of a run.

use super::error::{Error, Result};
use super::metrics::{METRICS, Metrics};
use super::plot::loss_svg;
use super::stats::trim_stats;
use crate::atomic::write_atomic;
use crate::read::read_text;
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fs;
use std::path::{Path, PathBuf};

const SETTINGS: &str = "run.json";
const SUMMARY: &str = "summary.json";
const LOSSES: &str = "loss.svg";
const STATS: &str = "stats.jsonl";
const CHECKPOINTS: &str = "checkpoint";
/// What was trained, as `fp8 train` writes it.
const RESULTS: [&str; 2] = ["model", "adapter"];
/// The largest text file that is read, in bytes.
const LIMIT: u64 = 1 << 30;

/// The folder that a run writes to:
///
/// | file | |
/// |---|---|
/// | `run.json` | its settings, for whoever resumes it |
/// | `checkpoint/NAME.safetensors` | the last checkpoint |
/// | `metrics.jsonl` | a line for each step and validation ([`Metrics`]) |
/// | `stats.jsonl` | a line for each cast of a measured step |
/// | `summary.json`, `loss.svg` | at the end |
/// | `model/`, `adapter/` | what `fp8 train` has trained |
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RunFolder {
    path: PathBuf,
}

impl RunFolder {
    /// Makes the folder of a new run and stores its settings. With `replace`, an earlier run in it is removed, with
    /// what it has trained.
    ///
    /// # Errors
    /// [`Error::RunExists`]; [`Error::NotOfARun`] where files of these names lie without a `run.json`, also with `replace`; and if a file cannot
    /// be written.
    pub fn create(
        path: impl Into<PathBuf>,
        settings: &impl Serialize,
        replace: bool,
    ) -> Result<Self> {
        let folder = Self { path: path.into() };
        // The settings are removed last: what is left of a removal that was killed still counts as a run.
        let own = [METRICS, SUMMARY, LOSSES, STATS, CHECKPOINTS];
        let own = own.iter().chain(&RESULTS).chain([&SETTINGS]);
        let old: Vec<_> = own
            .map(|name| (*name, folder.path.join(name)))
            .filter(|(_, path)| fs::symlink_metadata(path).is_ok())
            .collect();
        let is_run = old.last().is_some_and(|(name, _)| *name == SETTINGS);
        match old.first() {
            // Another program's: a run would replace them now or at its end.
            Some((found, _)) if !is_run => {
                return Err(Error::NotOfARun {
                    path: folder.path,
                    found: found.to_string(),
                });
            }
            Some(_) if !replace => {
                return Err(Error::RunExists { path: folder.path });
            }
            _ => {}
        }
        for (name, path) in &old {
            let removed = match *name == CHECKPOINTS || RESULTS.contains(name) {
                true => fs::remove_dir_all(path),
                false => fs::remove_file(path),
            };
            removed.map_err(Error::io(path, "remove it"))?;
        }
        fs::create_dir_all(&folder.path).map_err(Error::io(&folder.path, "create it"))?;
        // Written first, so that a run that is killed here can be resumed.
        write_json(&folder.path.join(SETTINGS), settings)?;
        folder.make_checkpoints()?;
        Ok(folder)
    }

    /// The folder of a run that was begun before.
    ///
    /// # Errors
    /// [`Error::NoRun`] if it holds none.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self> {
        let folder = Self { path: path.into() };
        if !folder.path.join(SETTINGS).is_file() {
            return Err(Error::NoRun {
                path: folder.path,
                reason: format!("there is no {SETTINGS}"),
            });
        }
        folder.make_checkpoints()?;
        Ok(folder)
    }

    fn make_checkpoints(&self) -> Result<()> {
        let path = self.path.join(CHECKPOINTS);
        fs::create_dir_all(&path).map_err(Error::io(&path, "create it"))
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The settings that the run was begun with.
    ///
    /// # Errors
    /// [`Error::NoRun`] if they are not those of such a run.
    pub fn settings<S: DeserializeOwned>(&self) -> Result<S> {
        let text = read_text(self.path.join(SETTINGS), LIMIT)?;
        serde_json::from_str(&text).map_err(|error| Error::NoRun {
            path: self.path.clone(),
            reason: format!("{SETTINGS}: {error}"),
        })
    }

    /// Whether [`RunFolder::finish`] has written all of its files.
    pub fn is_finished(&self) -> bool {
        self.path.join(SUMMARY).is_file()
    }

    /// The checkpoint file of the run `name`.
    pub fn checkpoint(&self, name: &str) -> PathBuf {
        let path = self.path.join(CHECKPOINTS);
        path.join(format!("{name}.safetensors"))
    }

    /// The metrics, with the lines of the run `name` up to its step `done`. Drops later lines, and their statistics, since those steps will be repeated.
    ///
    /// # Errors
    /// If the files cannot be read or written.
    pub fn metrics(&self, name: &str, done: u64) -> Result<Metrics> {
        trim_stats(self.stats(), |run, step| run == name && step <= done)?;
        Metrics::open(&self.path, |line| {
            line.recipe() == name && line.step() <= done
        })
    }

    /// The file of the casts of measured steps, for [`append_stats`](super::append_stats).
    pub fn stats(&self) -> PathBuf {
        self.path.join(STATS)
    }

    /// Writes `summary.json` and, if there is a loss, `loss.svg`.
    ///
    /// # Errors
    /// If they cannot be written.
    pub fn finish(
        &self,
        summary: &impl Serialize,
        metrics: &Metrics,
        names: &[&str],
        unit: &str,
    ) -> Result<()> {
        if !metrics.lines().is_empty() {
            let svg = loss_svg(metrics, names, unit)?;
            write_atomic(self.path.join(LOSSES), |out| out.write_all(svg.as_bytes()))?;
        }
        // Last, as the sign that the run is finished.
        write_json(&self.path.join(SUMMARY), summary)
    }
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    Ok(write_atomic(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })?)
}
