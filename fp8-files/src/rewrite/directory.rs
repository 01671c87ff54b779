//! A directory that appears complete or not at all.
//!
//! It is written under a hidden name beside its target, `.NAME.tmp-PROCESS-COUNT`, and locked as long as its process lives. A directory
//! left by a killed process is not locked, and the next process with the same target removes it. On systems that cannot exchange two
//! names, the replaced model has the name `.NAME.old-PROCESS-COUNT` for a moment; after a kill in that moment the next process renames it
//! back.

use crate::atomic::{FileError, is_unique, parent_of, sync_dir, unique};
use crate::error::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// A directory that is being written beside its target; removed when dropped.
#[derive(Debug)]
pub(super) struct Staging {
    target: PathBuf,
    path: PathBuf,
    overwrite: bool,
    /// Parents that were created for it, the deepest first.
    made: Vec<PathBuf>,
    done: bool,
    /// Holds the lock; None where directories cannot be locked.
    _lock: Option<File>,
}

impl Staging {
    /// # Errors
    /// [`Error::TargetExists`] unless the target is missing, empty, or a model and `overwrite`.
    pub(super) fn new(target: &Path, overwrite: bool) -> Result<Self> {
        // A link is followed: the directory that it points to is replaced.
        let target = match fs::canonicalize(target) {
            Ok(path) => path,
            Err(_) => target.to_path_buf(),
        };
        let Some(name) = target.file_name().map(OsString::from) else {
            return Err(FileError::NoName { path: target }.into());
        };
        let parent = parent_of(&target).to_path_buf();
        remove_stale(&parent, &name, &target);
        check_free(&target, overwrite)?;
        let mut staging = Self {
            path: PathBuf::new(),
            target,
            overwrite,
            made: missing(&parent),
            done: false,
            _lock: None,
        };
        fs::create_dir_all(&parent).map_err(staging.io("make the directory above it"))?;
        let action = "make a temporary directory beside it";
        // Before it is locked, another process may remove the new directory as a stale one.
        for _ in 0..ATTEMPTS {
            let path = parent.join(unique(prefix(&name, MADE)));
            fs::create_dir(&path).map_err(staging.io(action))?;
            let lock = lock(&path);
            if lock.is_some() || !can_lock(&path) {
                staging.path = path;
                staging._lock = lock;
                return Ok(staging);
            }
        }
        Err(staging.io(action)(io::ErrorKind::AlreadyExists.into()).into())
    }

    /// Where files are written until [`Staging::finish`].
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// The target directory.
    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// Moves the directory to its target. If there is a model, the two are exchanged atomically where the system supports it: on Linux and
    /// macOS with their own file systems.
    pub(super) fn finish(mut self) -> Result<()> {
        sync_dir(&self.path).map_err(self.io("sync the new files"))?;
        // The target may have been created meanwhile.
        check_free(&self.target, self.overwrite)?;
        let old = match fs::symlink_metadata(&self.target) {
            Ok(_) if is_empty(&self.target) => {
                fs::remove_dir(&self.target).map_err(self.io("replace the empty directory"))?;
                None
            }
            Ok(_) if exchange(&self.path, &self.target).is_ok() => {
                self.done = true;
                Some(self.path.clone())
            }
            Ok(_) => {
                let name = self.target.file_name().unwrap_or_default();
                let old = self.target.with_file_name(unique(prefix(name, REPLACED)));
                fs::rename(&self.target, &old).map_err(self.io("move the old directory away"))?;
                Some(old)
            }
            Err(_) => None,
        };
        if !self.done
            && let Err(source) = fs::rename(&self.path, &self.target)
        {
            if let Some(old) = &old {
                let _ = fs::rename(old, &self.target);
            }
            return Err(self.io("put the new directory there")(source).into());
        }
        self.done = true;
        sync_dir(parent_of(&self.target)).map_err(self.io("sync the directory above it"))?;
        match old.map(fs::remove_dir_all) {
            // Another process may have removed it as stale.
            Some(Err(source)) if source.kind() != io::ErrorKind::NotFound => {
                Err(self.io("remove what stood there before")(source).into())
            }
            _ => Ok(()),
        }
    }

    fn io(&self, action: &'static str) -> impl Fn(io::Error) -> FileError {
        FileError::io(&self.target, action)
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        if !self.path.as_os_str().is_empty() {
            // The error that led here matters more than a failure to clean up.
            let _ = fs::remove_dir_all(&self.path);
        }
        for made in &self.made {
            // Fails if other files were created there meanwhile; they stay.
            let _ = fs::remove_dir(made);
        }
    }
}

/// The middle of the names of directories that are being written, and of those that they replace.
const MADE: &str = ".tmp-";
const REPLACED: &str = ".old-";

/// How often creating and locking a directory is tried. It fails only if another process cleans up in between.
const ATTEMPTS: usize = 8;

/// The beginning of the hidden names beside a directory: `.NAME.tmp-`.
fn prefix(name: &OsStr, kind: &str) -> OsString {
    [OsStr::new("."), name, OsStr::new(kind)]
        .into_iter()
        .collect()
}

/// Removes what killed processes left of directories called `name`, and renames a model back that one of them had moved away. Errors
/// are ignored.
fn remove_stale(parent: &Path, name: &OsStr, target: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let (hidden, path) = (entry.file_name(), entry.path());
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_replaced = is_unique(&hidden, &prefix(name, REPLACED));
        if !is_directory || !(is_replaced || is_unique(&hidden, &prefix(name, MADE))) {
            continue;
        }
        // Held until the directory is gone.
        let Some(_lock) = lock(&path) else {
            continue;
        };
        let _ = match is_replaced && fs::symlink_metadata(target).is_err() {
            true => fs::rename(&path, target),
            false => fs::remove_dir_all(&path),
        };
    }
}

/// The directory, locked for this process; None if another process holds the lock, it is gone, or the system cannot lock directories.
fn lock(path: &Path) -> Option<File> {
    let directory = File::open(path).ok()?;
    directory.try_lock().ok()?;
    // It may have been removed before it was locked.
    path.is_dir().then_some(directory)
}

/// Whether the system can lock the directory at `path`; true if it is gone.
fn can_lock(path: &Path) -> bool {
    match File::open(path).map(|directory| directory.try_lock()) {
        Ok(Ok(()) | Err(fs::TryLockError::WouldBlock)) => true,
        Ok(Err(fs::TryLockError::Error(_))) => false,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Exchanges two directories atomically.
#[cfg(any(target_os = "linux", target_os = "macos"))]
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The directories of a path that do not exist, the deepest first.
fn missing(path: &Path) -> Vec<PathBuf> {
    let above = path.ancestors();
    let above = above.take_while(|path| !path.as_os_str().is_empty() && !path.exists());
    above.map(Path::to_path_buf).collect()
}

fn is_empty(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// Fails if the target must not be replaced. Only a model is ever overwritten, so that a mistyped path costs nothing else.
fn check_free(target: &Path, overwrite: bool) -> Result<()> {
    let refused = |reason| {
        Err(Error::TargetExists {
            path: target.to_path_buf(),
            reason,
        })
    };
    match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(FileError::io(target, "look at the directory")(source).into()),
        Ok(found) if !found.is_dir() => refused("is not a directory"),
        Ok(_) if is_empty(target) => Ok(()),
        Ok(_) if !overwrite => refused(
            "is not empty: the option to overwrite (--overwrite) replaces a model that stands there",
        ),
        Ok(_) if !target.join("config.json").is_file() => {
            refused("has no config.json, and only a model is overwritten")
        }
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn names(dir: &Path) -> Vec<String> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<String> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }

    fn write(staging: &Staging) {
        fs::write(staging.path().join("config.json"), "{}").unwrap();
    }

    #[test]
    fn only_unlocked_stale_directories_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let stale = ".out.tmp-1a2b-0";
        let others = [
            ".out.tmp-1a2b",
            ".out.tmp-x-0",
            ".outer.tmp-1a2b-0",
            "out.tmp-1a2b-0",
        ];
        for name in others.iter().chain([&stale]) {
            fs::create_dir(dir.path().join(name)).unwrap();
            fs::write(dir.path().join(name).join("model.safetensors"), "x").unwrap();
        }
        let first = Staging::new(&target, false).unwrap();
        assert!(!dir.path().join(stale).exists());
        // Two directories that are being written do not remove each other.
        let second = Staging::new(&target, true).unwrap();
        write(&first);
        write(&second);
        first.finish().unwrap();
        second.finish().unwrap();
        let mut left = others.map(String::from).to_vec();
        left.push("out".into());
        left.sort();
        assert_eq!(names(dir.path()), left);
    }

    /// After a kill between two renames.
    #[test]
    fn a_model_that_was_moved_away_is_restored() {
        let dir = tempfile::tempdir().unwrap();
        let (target, old) = (dir.path().join("out"), dir.path().join(".out.old-1a2b-0"));
        fs::create_dir(&old).unwrap();
        fs::write(old.join("config.json"), "old").unwrap();
        let refused = Staging::new(&target, false).unwrap_err();
        assert!(matches!(refused, Error::TargetExists { .. }), "{refused}");
        assert_eq!(
            fs::read_to_string(target.join("config.json")).unwrap(),
            "old"
        );
        // Beside a model it is the old version, which is removed.
        fs::create_dir(&old).unwrap();
        drop(Staging::new(&target, true).unwrap());
        assert_eq!(names(dir.path()), ["out"]);
    }

    /// With two renames a reader could find nothing in between.
    #[test]
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    fn a_reader_finds_one_model_or_the_other() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("out");
        let replace = || {
            let staging = Staging::new(&target, true).unwrap();
            write(&staging);
            staging.finish().unwrap();
        };
        replace();
        let (one, other) = (dir.path().join("one"), dir.path().join("other"));
        fs::create_dir(&one)
            .and_then(|()| fs::create_dir(&other))
            .unwrap();
        if exchange(&one, &other).is_err() {
            println!("skipped: this file system does not exchange names");
            return;
        }
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut missed = 0;
                while !stop.load(Ordering::Relaxed) {
                    missed += u32::from(!target.exists());
                }
                missed
            });
            for _ in 0..200 {
                replace();
            }
            stop.store(true, Ordering::Relaxed);
            assert_eq!(reader.join().unwrap(), 0);
        });
    }
}
