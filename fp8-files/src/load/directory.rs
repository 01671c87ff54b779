//! Finds the files of the model in a directory.

use crate::error::{Error, Result};
use crate::read::read_text;
use crate::safetensors_file::SafetensorsFile;
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

/// A limit above the size of any index; that of 700 billion parameters has ten megabytes.
pub(crate) const MAX_INDEX: u64 = 32 << 20;

/// Names of a model's file, or of its index before `.index.json`.
const MODELS: [&str; 2] = ["model.safetensors", "diffusion_pytorch_model.safetensors"];
const MISTRAL: &str = "consolidated.safetensors";

/// The files of a model, and its index.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) paths: Vec<PathBuf>,
    /// The file of each tensor in the index; empty without one.
    pub(super) index: HashMap<String, usize>,
    /// Path of the index.
    path: PathBuf,
}

/// Names of a model's file, or of its index before `.index.json`, the one to read first. Mistral's repositories may hold the model twice.
/// With a `config.json` the one for transformers is meant.
pub(crate) fn in_order(has_params: bool, has_config: bool) -> [&'static str; 3] {
    let [first, second] = MODELS;
    match has_params && !has_config {
        true => [MISTRAL, first, second],
        false => [first, second, MISTRAL],
    }
}

/// The files of the model in `directory`.
pub(super) fn files_of(directory: &Path) -> Result<Found> {
    let io = Error::read(directory);
    let has = |name: &str| is_file(&directory.join(name));
    let names = in_order(has("params.json"), has("config.json"));
    for name in names {
        let index = directory.join(format!("{name}.index.json"));
        if is_file(&index) {
            return read_index(directory, index);
        }
        let file = directory.join(name);
        if is_file(&file) {
            return Ok(Found::single(file));
        }
    }
    let mut others = vec![];
    for entry in std::fs::read_dir(directory).map_err(&io)? {
        let path = entry.map_err(&io)?.path();
        if path.extension().is_some_and(|ext| ext == "safetensors") {
            others.push(path);
        }
    }
    match others.as_slice() {
        [file] => Ok(Found::single(file.clone())),
        files => {
            let tried: Vec<String> = names
                .iter()
                .map(|name| format!("{name}(.index.json)"))
                .collect();
            Err(Error::NoCheckpoint {
                path: directory.to_path_buf(),
                reason: format!(
                    "expected {} or a single safetensors file, found {} of them",
                    tried.join(", "),
                    files.len()
                ),
            })
        }
    }
}

fn is_file(path: &Path) -> bool {
    // Opening rejects a pipe of that name.
    path.symlink_metadata().is_ok()
}

fn read_index(directory: &Path, path: PathBuf) -> Result<Found> {
    let text = read_text(&path, MAX_INDEX)?;
    let invalid = |reason: String| Error::json(&path, "the index", reason);
    let wrong = |entry: &str, reason: String| Error::Index {
        path: path.clone(),
        entry: entry.to_string(),
        reason,
    };
    let json: Value = serde_json::from_str(&text).map_err(|error| invalid(error.to_string()))?;
    let Some(Value::Object(map)) = json.get("weight_map") else {
        return Err(invalid("it has no object `weight_map`".into()));
    };
    if map.is_empty() {
        return Err(invalid("its `weight_map` is empty".into()));
    }
    let mut entries = vec![];
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| {
            let reason = format!("is said to be in {file}, expected the name of a file");
            wrong(tensor, reason)
        })?;
        entries.push((tensor, file));
    }
    let files: BTreeSet<&str> = entries.iter().map(|(_, file)| *file).collect();
    for file in &files {
        let mut parts = Path::new(file).components().peekable();
        let is_inside =
            parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)));
        let reason = match is_inside {
            false => "leads out of the directory",
            true if !is_file(&directory.join(file)) => "is named there but is not in the directory",
            true => continue,
        };
        return Err(wrong(file, reason.into()));
    }
    let numbers = files.iter().enumerate().map(|(at, file)| (*file, at));
    let numbers: HashMap<&str, usize> = numbers.collect();
    let index = entries.iter();
    let index = index.map(|(tensor, file)| ((*tensor).clone(), numbers[file]));
    let index = index.collect();
    Ok(Found {
        paths: files.iter().map(|file| directory.join(file)).collect(),
        index,
        path,
    })
}

impl Found {
    fn single(path: PathBuf) -> Self {
        Self {
            paths: vec![path],
            index: HashMap::new(),
            path: PathBuf::new(),
        }
    }

    /// Checks that every tensor is in the file that the index names.
    pub(super) fn check(&self, files: &[SafetensorsFile]) -> Result<()> {
        let entries = self.index.iter();
        let lost = entries.filter(|(name, at)| files[**at].dtype(name).is_none());
        match lost.min() {
            None => Ok(()),
            Some((name, at)) => Err(Error::Index {
                path: self.path.clone(),
                entry: name.clone(),
                reason: format!(
                    "is not in {}, where it should be",
                    files[*at].path().display()
                ),
            }),
        }
    }
}
