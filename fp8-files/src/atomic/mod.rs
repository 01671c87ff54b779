//! Writes files so that a crash, a full disk or an error never costs the old content.
//!
//! - [`write_atomic`] replaces one file: a temporary file beside it, flush, fsync, rename, fsync of
//!   the directory. A reader sees the old content or the new, never a mixture.
//! - [`write_safetensors_atomic`] does the same for named tensors, streamed one at a time.
//! - [`replace_together`] replaces files that belong together, such as a model and its configuration.
//!
//! A path must have one writer at a time; readers may come at any time.

mod apart;
mod safetensors;
mod together;
mod unique;

use crate::python_json;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Permissions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

pub use apart::keep_apart;
pub(crate) use safetensors::{Header, METADATA, write_tensor_data};
pub use safetensors::{write_safetensors, write_safetensors_atomic};
pub use together::{Part, replace_together};
use unique::is_of_another_process;
pub(crate) use unique::{is_unique, unique};

/// Size of the buffer between a writer and its file.
pub(crate) const BUFFER: usize = 1 << 20;

/// An error when writing or replacing a file or directory. Every message names the path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// A system call failed. The old content is still there.
    #[error("{path}: cannot {action}: {source}", path = .path.display())]
    Io {
        /// The file or directory to write.
        path: PathBuf,
        /// What failed; the message has it after "cannot".
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },

    /// The directory for the file does not exist.
    #[error("{path}: the directory {directory} does not exist",
        path = .path.display(), directory = .directory.display())]
    NoDirectory {
        /// The file or directory to write.
        path: PathBuf,
        /// The missing directory.
        directory: PathBuf,
    },

    /// The path cannot name a file, such as `/` or `..`.
    #[error("{path}: this path names no file", path = .path.display())]
    NoName {
        /// The path as given.
        path: PathBuf,
    },

    /// The path to write is one that is read, lies within one, or holds one.
    #[error("{path} {relation} {input}, which is read: choose another place to write to",
        path = .path.display(), input = .input.display())]
    IsInput {
        /// The path to write.
        path: PathBuf,
        /// `is`, `lies within` or `holds`.
        relation: &'static str,
        /// The file or directory that is read.
        input: PathBuf,
    },

    /// The path exists and is not a regular file, or its parent is not a directory.
    #[error("{path}: exists and is not a {expected}", path = .path.display())]
    WrongKind {
        /// The path that exists.
        path: PathBuf,
        /// `regular file` or `directory`.
        expected: &'static str,
    },

    /// A tensor cannot be written: its dtype is not supported, or its data cannot be copied to the host.
    #[error("{path}: tensor `{name}`: {source}", path = .path.display())]
    Tensor {
        /// The file to write.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// candle's error.
        source: Box<candle_core::Error>,
    },

    /// `__metadata__` is reserved by the safetensors format and cannot name a tensor.
    #[error("{path}: a tensor cannot be named `{name}`", path = .path.display())]
    ReservedName {
        /// The file to write.
        path: PathBuf,
        /// The name.
        name: String,
    },
}

impl FileError {
    /// For [`Result::map_err`]: adds the path and the action to a system error.
    pub fn io(path: &Path, action: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| FileError::Io {
            path: path.to_path_buf(),
            action,
            source,
        }
    }
}

/// Replaces the file at `path` atomically by what `write` writes.
///
/// A symbolic link is followed: the file it points to is replaced. The permissions of an existing file
/// are kept.
///
/// # Errors
/// [`FileError`] naming the path and what failed, also if `write` fails, and if `path` exists and is
/// not a regular file. The old file is then unchanged and the temporary file removed.
///
/// ```
/// # use fp8_recipes::atomic::write_atomic;
/// # let dir = tempfile::tempdir().unwrap();
/// let path = dir.path().join("summary.json");
/// write_atomic(&path, |file| writeln!(file, "{{}}"))?;
/// assert_eq!(std::fs::read_to_string(&path).unwrap(), "{}\n");
/// # Ok::<(), fp8_recipes::atomic::FileError>(())
/// ```
pub fn write_atomic(
    path: impl AsRef<Path>,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()>,
) -> Result<(), FileError> {
    let path = path.as_ref();
    replace_file(path, |file| {
        write(file).map_err(FileError::io(path, "write"))
    })
}

/// Writes JSON in several lines, with the tokens of [`python_json`] and a line feed at the end. `path` is for messages.
///
/// # Errors
/// [`FileError::Io`].
pub fn write_json(
    writer: &mut dyn Write,
    path: &Path,
    value: &serde_json::Value,
) -> Result<(), FileError> {
    let text = python_json::to_pretty(value) + "\n";
    let written = writer.write_all(text.as_bytes());
    written.map_err(FileError::io(path, "write"))
}

/// [`write_atomic`] for a `write` with errors of its own. It is the body of every atomic file write.
///
/// # Errors
/// As [`write_atomic`]; those of `write` as they are.
pub fn replace_file<E: From<FileError>>(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let target = Target::new(path)?;
    let old = match fs::metadata(&target.path) {
        Ok(metadata) if metadata.is_file() => Some(metadata),
        Ok(_) => {
            let (path, expected) = (target.path, "regular file");
            return Err(FileError::WrongKind { path, expected }.into());
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(FileError::io(path, "look at the old file")(error).into()),
    };
    let (temporary, file) = target.create_temporary()?;
    let guard = RemoveOnDrop {
        path: Some(temporary.clone()),
    };
    fill(path, file, old.map(|old| old.permissions()), write)?;
    fs::rename(&temporary, &target.path).map_err(FileError::io(path, "replace the old file"))?;
    guard.disarm();
    sync_dir(&target.directory).map_err(FileError::io(path, "sync the directory"))?;
    target.remove_stale();
    Ok(())
}

/// Writes and syncs a new file, which gets the permissions of the old one. `path` is for messages.
fn fill<E: From<FileError>>(
    path: &Path,
    file: File,
    permissions: Option<Permissions>,
    write: impl FnOnce(&mut dyn Write) -> Result<(), E>,
) -> Result<(), E> {
    let mut writer = BufWriter::with_capacity(BUFFER, file);
    write(&mut writer)?;
    let file = writer
        .into_inner()
        .map_err(|error| FileError::io(path, "write")(error.into_error()))?;
    if let Some(permissions) = permissions {
        file.set_permissions(permissions)
            .map_err(FileError::io(path, "set permissions"))?;
    }
    Ok(file
        .sync_all()
        .map_err(FileError::io(path, "sync to disk"))?)
}

/// Where a write ends up: the path with symbolic links followed, and its parts.
struct Target {
    path: PathBuf,
    directory: PathBuf,
    name: OsString,
}

impl Target {
    fn new(path: &Path) -> Result<Self, FileError> {
        let path = match fs::symlink_metadata(path) {
            Ok(metadata) if metadata.file_type().is_symlink() => {
                fs::canonicalize(path).map_err(FileError::io(path, "follow the symbolic link"))?
            }
            _ => path.to_path_buf(),
        };
        let Some(name) = path.file_name().map(OsStr::to_os_string) else {
            return Err(FileError::NoName { path });
        };
        let directory = parent_of(&path).to_path_buf();
        match fs::metadata(&directory) {
            Ok(metadata) if metadata.is_dir() => Ok(Self {
                path,
                directory,
                name,
            }),
            Ok(_) => Err(FileError::WrongKind {
                path: directory,
                expected: "directory",
            }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                Err(FileError::NoDirectory { path, directory })
            }
            Err(error) => Err(FileError::io(&directory, "look at the directory")(error)),
        }
    }

    /// The beginning of the names of temporary siblings: `NAME.tmp-`.
    fn prefix(&self) -> OsString {
        let mut prefix = self.name.clone();
        prefix.push(".tmp-");
        prefix
    }

    /// Removes temporary siblings that killed processes left behind. Errors are ignored.
    fn remove_stale(&self) {
        let Ok(entries) = fs::read_dir(&self.directory) else {
            return;
        };
        let prefix = self.prefix();
        for entry in entries.flatten() {
            if is_of_another_process(&entry.file_name(), &prefix) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Creates a temporary sibling under a free name.
    fn create_temporary(&self) -> Result<(PathBuf, File), FileError> {
        loop {
            let temporary = self.directory.join(unique(self.prefix()));
            let action = "create a temporary file beside it";
            match File::create_new(&temporary) {
                Ok(created) => return Ok((temporary, created)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(FileError::io(&self.path, action)(error)),
            }
        }
    }
}

/// The directory that `path` is in.
pub(crate) fn parent_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Removes a temporary file unless disarmed; runs while unwinding too.
struct RemoveOnDrop {
    path: Option<PathBuf>,
}

impl RemoveOnDrop {
    fn disarm(mut self) {
        self.path = None;
    }
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The error that led here matters more than a failure to clean up.
            let _ = fs::remove_file(path);
        }
    }
}

/// Syncs renames and new names in a directory to disk. Only Unix can open a directory for this.
pub(crate) fn sync_dir(directory: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(directory)?.sync_all()
    } else {
        Ok(())
    }
}
