//! The target of an export: a directory and the name of the model in it.

use crate::error::{ExportError, Result};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Extension of a model.
const EXTENSION: &str = "safetensors";
/// The index of a model in shards.
const INDEX: &str = "model.safetensors.index.json";

/// Where model and configuration are written.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) directory: PathBuf,
    /// File name of the model.
    pub(super) model: OsString,
}

impl Place {
    /// A path that ends in `.safetensors` and is not a directory is a file; any other path is a directory, because names of models
    /// contain dots.
    pub(super) fn new(path: &Path) -> Result<Self> {
        let extension = path.extension();
        let named = extension.is_some_and(|extension| extension.eq_ignore_ascii_case(EXTENSION));
        // `v1.safetensors/` is a directory that may not exist yet.
        let directory = !named || path.is_dir() || ends_in_separator(path);
        match path.file_name() {
            Some(name) if !directory => Ok(Self {
                directory: or_here(path.parent().unwrap_or(Path::new(""))),
                model: name.to_os_string(),
            }),
            _ if path.exists() && !path.is_dir() => Err(ExportError::Target {
                path: path.to_path_buf(),
            }
            .into()),
            _ => Ok(Self {
                directory: or_here(path),
                model: format!("model.{EXTENSION}").into(),
            }),
        }
    }

    pub(super) fn model_path(&self) -> PathBuf {
        self.directory.join(&self.model)
    }

    pub(super) fn config_path(&self) -> PathBuf {
        self.directory.join("config.json")
    }

    /// Fails for a directory whose index would hide the exported file.
    pub(super) fn refuse_shards(&self) -> Result<()> {
        let index = self.directory.join(INDEX);
        match index.symlink_metadata() {
            Ok(_) => Err(ExportError::Sharded { index }.into()),
            Err(_) => Ok(()),
        }
    }

    /// Creates the directory and its missing parents.
    pub(super) fn make_directory(&self) -> Result<Made> {
        let mut missing: Vec<PathBuf> = vec![];
        let mut at = self.directory.as_path();
        while !at.as_os_str().is_empty() && !at.exists() {
            missing.push(at.to_path_buf());
            match at.parent() {
                Some(parent) => at = parent,
                None => break,
            }
        }
        if std::fs::metadata(&self.directory).is_ok_and(|found| !found.is_dir()) {
            return Err(crate::atomic::FileError::WrongKind {
                path: self.directory.clone(),
                expected: "directory",
            }
            .into());
        }
        let made = Made(missing);
        match std::fs::create_dir_all(&self.directory) {
            Ok(()) => Ok(made),
            Err(source) => Err(crate::atomic::FileError::Io {
                path: self.directory.clone(),
                action: "make the directory",
                source,
            }
            .into()),
        }
    }
}

/// Directories created for an export, the deepest first; dropped unless kept, they are removed again.
#[derive(Debug)]
pub(super) struct Made(Vec<PathBuf>);

impl Made {
    pub(super) fn keep(mut self) {
        self.0.clear();
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for path in &self.0 {
            // Fails, as it should, if another program has put a file there in the meantime.
            let _ = std::fs::remove_dir(path);
        }
    }
}

fn or_here(path: &Path) -> PathBuf {
    match path.as_os_str().is_empty() {
        true => PathBuf::from("."),
        false => path.to_path_buf(),
    }
}

fn ends_in_separator(path: &Path) -> bool {
    let bytes = path.as_os_str().as_encoded_bytes();
    bytes
        .last()
        .is_some_and(|last| std::path::is_separator(char::from(*last)))
}
