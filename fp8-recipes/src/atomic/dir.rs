//! Replacing a directory of several files, and picking up after a kill.
//!
//! With `DIR` the checkpoint, a write goes through these states; a kill may come between any two.
//!
//! | after | DIR | DIR.old | DIR.tmp-* |
//! |---|---|---|---|
//! | files written and synced | old | - | new |
//! | `DIR` renamed to `DIR.old` | - | old | new |
//! | `DIR.tmp-*` renamed to `DIR` | new | old | - |
//! | `DIR.old` renamed to `DIR.tmp-*` and removed | new | - | - |
//!
//! So `DIR.old` is always complete, and at every moment `DIR` or `DIR.old` can be loaded.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::{FileError, RemoveOnDrop, Target, sync_dir};

/// Name of a checkpoint set aside while the new one takes its place.
const OLD: &str = ".old";

/// Replaces the directory at `path` by a new one that `fill` fills, all or nothing.
///
/// `fill` gets an empty directory beside `path` and writes plain files into it; they are synced to
/// disk before the directory takes its place. What an earlier, killed write left behind is restored
/// or removed first, as [`recover_dir`] does.
///
/// # Errors
/// `fill`'s own error, or a [`FileError`] naming the path and what failed. The old directory is
/// then in its place, unchanged, and the new one removed. The parent directory must exist.
pub fn replace_dir_atomic<E: From<FileError>>(
    path: impl AsRef<Path>,
    fill: impl FnOnce(&Path) -> Result<(), E>,
) -> Result<(), E> {
    let path = path.as_ref();
    let target = Target::new(path)?;
    recover(&target)?;
    if target.path.exists() && !target.path.is_dir() {
        return Err(FileError::WrongKind {
            path: target.path,
            expected: "directory",
        }
        .into());
    }
    let (temporary, ()) = target.create_temporary(|temporary| fs::create_dir(temporary))?;
    let guard = RemoveOnDrop {
        path: Some(temporary.clone()),
    };
    fill(&temporary)?;
    sync_tree(&temporary).map_err(FileError::io(path, "sync to disk"))?;
    swap(&target, &temporary)?;
    guard.disarm();
    sync_dir(&target.directory).map_err(FileError::io(path, "sync the directory"))?;
    remove_old(&target)?;
    Ok(())
}

/// Finishes what a killed [`replace_dir_atomic`] left: restores `path` from its `.old` sibling
/// where `path` is missing, and removes siblings that are no longer needed. To be called by the
/// writer, before it reads; a second process that only reads uses [`locate_dir`].
///
/// # Returns
/// Whether `path` is now there.
///
/// # Errors
/// [`FileError`] when a rename or a removal fails, or the parent directory is missing.
pub fn recover_dir(path: impl AsRef<Path>) -> Result<bool, FileError> {
    let target = Target::new(path.as_ref())?;
    recover(&target)?;
    Ok(target.path.is_dir())
}

/// The directory to read for the checkpoint `path`: itself, or its `.old` sibling when a write was
/// killed (or is just now) between its two renames. Changes nothing.
///
/// # Errors
/// [`FileError::NotFound`] when neither is there.
pub fn locate_dir(path: impl AsRef<Path>) -> Result<PathBuf, FileError> {
    let path = path.as_ref();
    // A write in progress may swap the two between the checks, hence the second look.
    for _ in 0..2 {
        if path.is_dir() {
            return Ok(path.to_path_buf());
        }
        if let Ok(target) = Target::new(path) {
            let old = target.sibling(OLD);
            if old.is_dir() {
                return Ok(old);
            }
        }
    }
    Err(FileError::NotFound {
        path: path.to_path_buf(),
    })
}

fn recover(target: &Target) -> Result<(), FileError> {
    let old = target.sibling(OLD);
    if old.is_dir() {
        if target.path.exists() {
            remove_old(target)?;
        } else {
            fs::rename(&old, &target.path).map_err(FileError::io(
                &target.path,
                "restore it from its .old sibling",
            ))?;
            sync_dir(&target.directory)
                .map_err(FileError::io(&target.path, "sync the directory"))?;
        }
    }
    target.remove_stale();
    Ok(())
}

/// Puts `temporary` in the place of the target; on an error the target is as it was.
fn swap(target: &Target, temporary: &Path) -> Result<(), FileError> {
    let path = &target.path;
    if !path.exists() {
        return fs::rename(temporary, path).map_err(FileError::io(path, "move it into place"));
    }
    let old = target.sibling(OLD);
    fs::rename(path, &old).map_err(FileError::io(path, "set the old directory aside"))?;
    fs::rename(temporary, path).map_err(|error| {
        // Should this fail too, `.old` is still complete and the next call restores it.
        let _ = fs::rename(&old, path);
        FileError::io(path, "move it into place")(error)
    })
}

/// Removes `.old` under a temporary name, so that a half removed directory is never called `.old`.
fn remove_old(target: &Target) -> Result<(), FileError> {
    let old = target.sibling(OLD);
    if !old.exists() {
        return Ok(());
    }
    let trash = target.temporary();
    fs::rename(&old, &trash)
        .and_then(|()| fs::remove_dir_all(&trash))
        .map_err(FileError::io(&target.path, "remove the old directory"))
}

/// Syncs every file below `directory`, then the directories, innermost first.
fn sync_tree(directory: &Path) -> io::Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync_tree(&entry.path())?;
        } else if kind.is_file() {
            // Opened for writing: some systems refuse to sync a file that was opened for reading.
            fs::OpenOptions::new()
                .append(true)
                .open(entry.path())?
                .sync_all()?;
        }
    }
    sync_dir(directory)
}
