//! Which files of a directory are the model.

use crate::error::{Error, Result};
use crate::read::read_text;
use crate::safetensors_file::SafetensorsFile;
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::path::{Component, Path, PathBuf};

/// Longer than the index of any model; one of 700 billion parameters takes ten megabytes.
const MAX_INDEX: u64 = 32 << 20;

/// Names under which a model is kept, before and after `.index.json`.
const MODELS: [&str; 2] = ["model.safetensors", "diffusion_pytorch_model.safetensors"];
const MISTRAL: &str = "consolidated.safetensors";

/// The files, and what an index says of them.
#[derive(Debug)]
pub(super) struct Found {
    pub(super) paths: Vec<PathBuf>,
    /// The file of each tensor, if an index tells.
    pub(super) index: HashMap<String, usize>,
    /// The index.
    path: PathBuf,
}

/// The files of the model in `directory`.
pub(super) fn files_of(directory: &Path) -> Result<Found> {
    let io = |source| Error::Read {
        path: directory.to_path_buf(),
        source,
    };
    // Mistral's repositories may hold the model twice; what stands beside config.json is the one for transformers.
    let is_mistral =
        is_file(&directory.join("params.json")) && !is_file(&directory.join("config.json"));
    let [first, second] = MODELS;
    let names = match is_mistral {
        true => [MISTRAL, first, second],
        false => [first, second, MISTRAL],
    };
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
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
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
    // A pipe of that name is refused when it is opened.
    path.symlink_metadata().is_ok()
}

fn read_index(directory: &Path, path: PathBuf) -> Result<Found> {
    let text = read_text(&path, MAX_INDEX)?;
    let invalid = |reason: String| Error::Json {
        path: path.clone(),
        what: "the index",
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
        let file = file.as_str().ok_or_else(|| Error::Index {
            path: path.clone(),
            entry: tensor.clone(),
            reason: format!("is said to be in {file}, expected the name of a file"),
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
        return Err(Error::Index {
            path: path.clone(),
            entry: file.to_string(),
            reason: reason.into(),
        });
    }
    let numbers: HashMap<&str, usize> = files
        .iter()
        .enumerate()
        .map(|(at, file)| (*file, at))
        .collect();
    let index = entries
        .iter()
        .map(|(tensor, file)| ((*tensor).clone(), numbers[file]))
        .collect();
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

    /// Every tensor is in the file that the index says.
    pub(super) fn check(&self, files: &[SafetensorsFile]) -> Result<()> {
        let mut lost: Vec<(&String, usize)> = self
            .index
            .iter()
            .filter(|(name, at)| files[**at].dtype(name).is_none())
            .map(|(name, at)| (name, *at))
            .collect();
        lost.sort_unstable();
        match lost.first() {
            None => Ok(()),
            Some((name, at)) => Err(Error::Index {
                path: self.path.clone(),
                entry: (*name).clone(),
                reason: format!(
                    "is not in {}, where it should be",
                    files[*at].path().display()
                ),
            }),
        }
    }
}
