//! Writing files so that a crash, a full disk or an error never costs the old content.
//!
//! - [`write_atomic`] replaces one file: a temporary file beside it, flush, fsync, rename, fsync of
//!   the directory. A reader sees the old content or the new, never a mixture.
//! - [`write_safetensors_atomic`] does so for named tensors, streamed one at a time.
//! - Files that belong together, a model and its configuration, are replaced together: `together.rs`.
//!
//! There is one writer per path at a time; readers may come at any time.

mod safetensors;
mod together;

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) use safetensors::write_tensor_data;
pub use safetensors::{write_safetensors, write_safetensors_atomic};
pub use together::{Part, replace_together};

/// Buffer between a writer and its file.
const BUFFER: usize = 1 << 20;

/// An error of writing or replacing a file or directory. Every message names the path.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The operating system refused. The old content is still there.
    #[error("{path}: cannot {action}: {source}", path = .path.display())]
    Io {
        /// The file or directory that was to be written.
        path: PathBuf,
        /// What failed, as it reads after "cannot".
        action: &'static str,
        /// The system's own error.
        source: io::Error,
    },

    /// The directory that is to hold the file does not exist.
    #[error("{path}: the directory {directory} does not exist",
        path = .path.display(), directory = .directory.display())]
    NoDirectory {
        /// The file or directory that was to be written.
        path: PathBuf,
        /// The directory that is missing.
        directory: PathBuf,
    },

    /// The path cannot name a file, such as `/` or `..`.
    #[error("{path}: this path names no file", path = .path.display())]
    NoName {
        /// The path as given.
        path: PathBuf,
    },

    /// Something other than a regular file stands at the path, or other than a directory at its parent.
    #[error("{path}: exists and is not a {expected}", path = .path.display())]
    WrongKind {
        /// The path that is taken.
        path: PathBuf,
        /// `regular file` or `directory`.
        expected: &'static str,
    },

    /// A tensor cannot be written: its dtype has no safetensors form here, or its data could not be
    /// brought to the host.
    #[error("{path}: tensor `{name}`: {source}", path = .path.display())]
    Tensor {
        /// The file that was to be written.
        path: PathBuf,
        /// The tensor at fault.
        name: String,
        /// candle's own error.
        source: Box<candle_core::Error>,
    },

    /// `__metadata__` is reserved by the safetensors format and cannot name a tensor.
    #[error("{path}: a tensor cannot be named `{name}`", path = .path.display())]
    ReservedName {
        /// The file that was to be written.
        path: PathBuf,
        /// The name at fault.
        name: String,
    },
}

impl FileError {
    /// A map for [`Result::map_err`]: wraps a system error with its path and action.
    fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| FileError::Io {
            path: path.to_path_buf(),
            action,
            source,
        }
    }
}

/// Replaces the file at `path` by what `write` writes, all or nothing.
///
/// A symbolic link is followed: the file it points to is replaced. Permissions of an existing file
/// are kept.
///
/// # Errors
/// [`FileError`] naming the path and what failed, `write`'s own error included. The old file is
/// then unchanged and the temporary file removed. Anything at `path` that is not a regular file is
/// refused.
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

/// The body of every atomic file write.
fn replace_file(
    path: &Path,
    write: impl FnOnce(&mut dyn Write) -> Result<(), FileError>,
) -> Result<(), FileError> {
    let target = Target::new(path)?;
    let old = match fs::metadata(&target.path) {
        Ok(metadata) if metadata.is_file() => Some(metadata),
        Ok(_) => {
            let path = target.path;
            return Err(FileError::WrongKind {
                path,
                expected: "regular file",
            });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(FileError::io(path, "look at the old file")(error)),
    };
    let (temporary, file) = target.create_temporary()?;
    let guard = RemoveOnDrop {
        path: Some(temporary.clone()),
    };

    let mut writer = BufWriter::with_capacity(BUFFER, file);
    write(&mut writer)?;
    let file = match writer.into_inner() {
        Ok(file) => file,
        Err(error) => return Err(FileError::io(path, "write")(error.into_error())),
    };
    if let Some(old) = old {
        file.set_permissions(old.permissions())
            .map_err(FileError::io(path, "set permissions"))?;
    }
    file.sync_all()
        .map_err(FileError::io(path, "sync to disk"))?;
    drop(file);
    fs::rename(&temporary, &target.path).map_err(FileError::io(path, "replace the old file"))?;
    guard.disarm();
    sync_dir(&target.directory).map_err(FileError::io(path, "sync the directory"))?;
    target.remove_stale();
    Ok(())
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
        let directory = match path.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
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

    /// A path of a temporary sibling that no other call has had: `NAME.tmp-PROCESS-COUNT`.
    fn temporary(&self) -> PathBuf {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let count = COUNTER.fetch_add(1, Ordering::Relaxed);
        let mut name = self.name.clone();
        name.push(format!("{TEMPORARY}{}-{count}", process_token()));
        self.directory.join(name)
    }

    /// Removes temporary siblings that processes killed earlier left behind, as far as possible.
    fn remove_stale(&self) {
        let Ok(entries) = fs::read_dir(&self.directory) else {
            return;
        };
        for entry in entries.flatten() {
            if self.is_stale(&entry.file_name()) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// Whether this is the name of a temporary sibling that another process made.
    fn is_stale(&self, name: &OsStr) -> bool {
        let mut prefix = self.name.clone();
        prefix.push(TEMPORARY);
        let rest = name
            .as_encoded_bytes()
            .strip_prefix(prefix.as_encoded_bytes());
        let Some(rest) = rest.and_then(|rest| std::str::from_utf8(rest).ok()) else {
            return false;
        };
        let hex = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_hexdigit());
        match rest.split('-').collect::<Vec<_>>()[..] {
            [token, count] => hex(token) && hex(count) && token != process_token(),
            _ => false,
        }
    }

    /// Creates a temporary sibling; a name that is taken is passed over.
    fn create_temporary(&self) -> Result<(PathBuf, File), FileError> {
        loop {
            let temporary = self.temporary();
            match OpenOptions::new()
                .write(true)
                .create_new(true)
                .open(&temporary)
            {
                Ok(created) => return Ok((temporary, created)),
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(FileError::io(
                        &self.path,
                        "create a temporary file beside it",
                    )(error));
                }
            }
        }
    }
}

/// Middle part of the name of a temporary file, after the target's name.
const TEMPORARY: &str = ".tmp-";

/// Tells this process from every earlier one, also where process numbers repeat (containers).
pub(crate) fn process_token() -> &'static str {
    static TOKEN: OnceLock<String> = OnceLock::new();
    TOKEN.get_or_init(|| {
        let since_epoch = SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default();
        format!("{:x}{:x}", std::process::id(), since_epoch.as_nanos())
    })
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

/// Makes renames and new names in a directory last. Only Unix can open a directory for this.
pub(crate) fn sync_dir(directory: &Path) -> io::Result<()> {
    if cfg!(unix) {
        File::open(directory)?.sync_all()
    } else {
        Ok(())
    }
}
