//! The index of a checkpoint in parts: which file holds which elements.

use super::super::meta::mismatch;
use crate::atomic::write_atomic;
use crate::error::{Result, json_error};
use fp8_files::read::read_bytes;
use fp8_ranks::ShardedVarMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Its name in the checkpoint's directory. A checkpoint without it is not complete.
pub(super) const INDEX: &str = "index.json";
const VERSION: u32 = 1;
/// A limit above what the index of a very large model needs.
const MOST_BYTES: u64 = 1 << 30;

/// The index.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Index {
    version: u32,
    /// A file for each rank that has saved.
    pub(super) files: Vec<String>,
    pub(super) parameters: BTreeMap<String, Stored>,
}

/// A parameter.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Stored {
    pub(super) shape: Vec<usize>,
    /// Elements in each file: consecutive ranges of the flat parameter.
    pub(super) counts: Vec<usize>,
    /// The optimizer's tensors of its elements: `exp_avg`, ..
    #[serde(default)]
    pub(super) moments: BTreeSet<String>,
}

impl Stored {
    /// The elements in file number `file`.
    pub(super) fn range(&self, file: usize) -> Range<usize> {
        let begin = self.counts.iter().take(file).sum();
        begin..begin + self.counts.get(file).copied().unwrap_or(0)
    }
}

impl Index {
    /// `moments`: parameters with the names of their moments.
    pub(super) fn of<'a>(
        map: &ShardedVarMap,
        files: Vec<String>,
        moments: impl Iterator<Item = &'a (String, String)> + Clone,
    ) -> Self {
        let parameters = map.vars().into_iter().map(|var| {
            let own = moments.clone().filter(|(name, _)| name == var.name());
            let stored = Stored {
                shape: var.dims().to_vec(),
                counts: var.layout().counts().to_vec(),
                moments: own.map(|(_, part)| part.clone()).collect(),
            };
            (var.name().to_string(), stored)
        });
        Self {
            version: VERSION,
            files,
            parameters: parameters.collect(),
        }
    }

    pub(super) fn path(dir: &Path) -> PathBuf {
        dir.join(INDEX)
    }

    /// Replaces the index of `dir`.
    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        let path = Self::path(dir);
        let json = serde_json::to_vec(self);
        let json = json.map_err(|error| json_error(&path, "the index", error))?;
        Ok(write_atomic(&path, |file| file.write_all(&json))?)
    }

    /// Reads and checks the index of `dir`.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let path = Self::path(dir);
        let bytes = read_bytes(&path, MOST_BYTES)?;
        let read = serde_json::from_slice(&bytes);
        let index: Self = read.map_err(|error| json_error(&path, "the index", error))?;
        let bad = |what: String| Err(json_error(&path, "the index", what));
        if index.version != VERSION {
            return bad(format!("version {}, expected {VERSION}", index.version));
        }
        if index.files.is_empty() {
            return bad("it names no files".into());
        }
        for file in &index.files {
            // Only files of this directory are accepted.
            if Path::new(file).file_name() != Some(file.as_ref()) {
                return bad(format!("`{file}` is not the name of a file"));
            }
        }
        for (name, Stored { shape, counts, .. }) in &index.parameters {
            let all = |numbers: &[usize], first, next: fn(usize, usize) -> Option<usize>| {
                numbers
                    .iter()
                    .try_fold(first, |sum, number| next(sum, *number))
            };
            let elements = all(shape, 1, usize::checked_mul);
            let held = all(counts, 0, usize::checked_add);
            if elements.is_none() || elements != held || counts.len() != index.files.len() {
                return bad(format!(
                    "`{name}` of shape {shape:?} has {counts:?} elements in {} files",
                    index.files.len()
                ));
            }
        }
        Ok(index)
    }

    /// Checks that the checkpoint has the parameters of `map`.
    pub(super) fn check(&self, dir: &Path, map: &ShardedVarMap) -> Result<()> {
        let here: BTreeMap<String, Vec<usize>> = (map.vars().into_iter())
            .map(|var| (var.name().to_string(), var.dims().to_vec()))
            .collect();
        let text = |shape: Option<&Vec<usize>>| match shape {
            Some(shape) => format!("{shape:?}"),
            None => "missing".to_string(),
        };
        for name in self.parameters.keys().chain(here.keys()) {
            let there = self.parameters.get(name).map(|stored| &stored.shape);
            let here = here.get(name);
            if there != here {
                let what = format!("parameter `{name}`");
                return Err(mismatch(&Self::path(dir), &what, text(there), text(here)));
            }
        }
        Ok(())
    }
}
