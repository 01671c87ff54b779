//! Where the files of a model are.

use crate::error::{Error, Result};
use crate::read::open_regular;
use crate::safetensors_file::{ReadAt, local_reader};
use std::path::{Path, PathBuf};

/// A model's files: in a local folder, or on a server with the small ones in a local folder.
pub trait Folder: Sync {
    /// The local folder with the JSON files: configurations and index.
    fn directory(&self) -> &Path;

    /// Names of all files of the model, without folders in it.
    ///
    /// # Errors
    /// If the folder cannot be read.
    fn names(&self) -> Result<Vec<String>>;

    /// Opens a file, and its length in bytes.
    ///
    /// # Errors
    /// If it cannot be opened.
    fn open(&self, name: &str) -> Result<(Box<dyn ReadAt>, u64)>;

    /// What messages call a file.
    fn place(&self, name: &str) -> PathBuf {
        self.directory().join(name)
    }

    /// Whether reading means asking a server. Then more threads read, and only a part of long scales is read.
    fn is_remote(&self) -> bool {
        false
    }
}

/// A local folder, or one file in it.
pub(super) struct Local {
    directory: PathBuf,
    /// The only file to read.
    file: Option<String>,
}

impl Local {
    pub(super) fn new(path: &Path) -> Self {
        let is_file = path.is_file();
        let name = path.file_name().filter(|_| is_file);
        match (name.and_then(|name| name.to_str()), path.parent()) {
            (Some(name), Some(parent)) => Self {
                directory: parent.to_path_buf(),
                file: Some(name.to_string()),
            },
            _ => Self {
                directory: path.to_path_buf(),
                file: None,
            },
        }
    }

    /// The only file to read.
    pub(super) fn file(&self) -> Option<&str> {
        self.file.as_deref()
    }
}

impl Folder for Local {
    fn directory(&self) -> &Path {
        &self.directory
    }

    fn names(&self) -> Result<Vec<String>> {
        let io = Error::read(&self.directory);
        let mut names = vec![];
        for entry in std::fs::read_dir(&self.directory).map_err(&io)? {
            names.extend(entry.map_err(&io)?.file_name().into_string());
        }
        names.sort_unstable();
        Ok(names)
    }

    fn open(&self, name: &str) -> Result<(Box<dyn ReadAt>, u64)> {
        let path = self.directory.join(name);
        let file = open_regular(&path)?;
        let length = file.metadata().map_err(Error::read(&path))?.len();
        Ok((local_reader(file), length))
    }
}
