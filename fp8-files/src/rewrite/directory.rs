//! A directory that comes into sight whole or not at all.
//!
//! It is made under a hidden name beside its place: `.NAME.tmp-PROCESS-COUNT`, locked as long as its process lives. What a killed process has
//! left there is not locked, and goes when the next one makes a directory of that name. Where two names cannot be exchanged, the model
//! that is replaced stands under `.NAME.old-PROCESS-COUNT` for a moment; after a kill in it the next process puts it back.

use crate::atomic::{FileError, process_token, sync_dir};
use crate::error::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// A directory in the making, beside the one that it will be; removed when dropped.
#[derive(Debug)]
pub(super) struct Staging {
    target: PathBuf,
    path: PathBuf,
    overwrite: bool,
    /// Parents that were made for it, the deepest first.
    made: Vec<PathBuf>,
    done: bool,
    /// Locked; None where directories cannot be.
    _lock: Option<File>,
}

impl Staging {
    /// # Errors
    /// [`Error::TargetExists`] unless the target is missing, empty, or a model and `overwrite`.
    pub(super) fn new(target: &Path, overwrite: bool) -> Result<Self> {
        // The directory that a link leads to is the one that is replaced.
        let target = match fs::canonicalize(target) {
            Ok(path) => path,
            Err(_) => target.to_path_buf(),
        };
        let Some(name) = target.file_name().map(OsString::from) else {
            return Err(FileError::NoName { path: target }.into());
        };
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
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
        if let Err(source) = fs::create_dir_all(&parent) {
            return Err(staging.io("make the directory above it", source));
        }
        let action = "make a temporary directory beside it";
        // Another process may take the new directory for a stale one before it is locked.
        for _ in 0..ATTEMPTS {
            let path = parent.join(beside(&name, MADE));
            fs::create_dir(&path).map_err(|source| staging.io(action, source))?;
            let lock = lock(&path);
            if lock.is_some() || !can_lock(&path) {
                staging.path = path;
                staging._lock = lock;
                return Ok(staging);
            }
        }
        Err(staging.io(action, io::ErrorKind::AlreadyExists.into()))
    }

    /// Where files are written meanwhile.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What the directory will be.
    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// Puts the directory where it belongs. A model that is replaced changes places with it in one moment where the system can
    /// do that, which Linux and macOS can on their own file systems.
    pub(super) fn finish(mut self) -> Result<()> {
        sync_dir(&self.path).map_err(|source| self.io("sync the new files", source))?;
        // It may have come into being meanwhile.
        check_free(&self.target, self.overwrite)?;
        let old = match fs::symlink_metadata(&self.target) {
            Ok(_) if is_empty(&self.target) => {
                fs::remove_dir(&self.target)
                    .map_err(|source| self.io("replace the empty directory", source))?;
                None
            }
            Ok(_) if exchange(&self.path, &self.target).is_ok() => {
                self.done = true;
                Some(self.path.clone())
            }
            Ok(_) => {
                let name = self.target.file_name().unwrap_or_default();
                let old = self.target.with_file_name(beside(name, REPLACED));
                fs::rename(&self.target, &old)
                    .map_err(|source| self.io("move the old directory away", source))?;
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
            return Err(self.io("put the new directory there", source));
        }
        self.done = true;
        if let Some(parent) = self.target.parent().filter(|p| !p.as_os_str().is_empty()) {
            sync_dir(parent).map_err(|source| self.io("sync the directory above it", source))?;
        }
        match old.map(fs::remove_dir_all) {
            // Another process may have removed it as a stale one.
            Some(Err(source)) if source.kind() != io::ErrorKind::NotFound => {
                Err(self.io("remove what stood there before", source))
            }
            _ => Ok(()),
        }
    }

    fn io(&self, action: &'static str, source: io::Error) -> Error {
        FileError::Io {
            path: self.target.clone(),
            action,
            source,
        }
        .into()
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
            // Fails where something else was put there meanwhile, which then stays.
            let _ = fs::remove_dir(made);
        }
    }
}

/// What stands before the number of the process in the names of directories in the making and of those that they replace.
const MADE: &str = ".tmp-";
const REPLACED: &str = ".old-";

/// How often a new directory is made before it is locked: once, unless others clean up in that moment.
const ATTEMPTS: usize = 8;

/// A name that no other call has had: `.NAME.tmp-PROCESS-COUNT`.
fn beside(name: &OsStr, kind: &str) -> OsString {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!("{kind}{}-{count}", process_token()));
    hidden
}

/// Whether `hidden` is a name that [`beside`] gives.
fn is_beside(hidden: &OsStr, name: &OsStr, kind: &str) -> bool {
    let hidden = hidden.as_encoded_bytes().strip_prefix(b".");
    let rest = hidden.and_then(|hidden| hidden.strip_prefix(name.as_encoded_bytes()));
    let rest = rest.and_then(|rest| rest.strip_prefix(kind.as_bytes()));
    let Some(Ok(rest)) = rest.map(std::str::from_utf8) else {
        return false;
    };
    let is_hex = |part: &str| !part.is_empty() && part.bytes().all(|c| c.is_ascii_hexdigit());
    let parts = rest.split_once('-');
    parts.is_some_and(|(process, count)| is_hex(process) && is_hex(count))
}

/// Removes what killed processes have left of directories called `name`, and puts back a model that one of them had moved away; all
/// as far as possible.
fn remove_stale(parent: &Path, name: &OsStr, target: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.flatten() {
        let (hidden, path) = (entry.file_name(), entry.path());
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        let is_replaced = is_beside(&hidden, name, REPLACED);
        if !is_directory || !(is_replaced || is_beside(&hidden, name, MADE)) {
            continue;
        }
        // Held until it is gone.
        let Some(_lock) = lock(&path) else {
            continue;
        };
        let _ = match is_replaced && fs::symlink_metadata(target).is_err() {
            true => fs::rename(&path, target),
            false => fs::remove_dir_all(&path),
        };
    }
}

/// The directory, locked for this process; None if another has locked it, it is gone, or the system locks no directories.
fn lock(path: &Path) -> Option<File> {
    let directory = File::open(path).ok()?;
    directory.try_lock().ok()?;
    // It may have been removed before it was locked.
    path.is_dir().then_some(directory)
}

/// Whether directories like that at `path` can be locked; also if it is gone.
fn can_lock(path: &Path) -> bool {
    match File::open(path).map(|directory| directory.try_lock()) {
        Ok(Ok(()) | Err(fs::TryLockError::WouldBlock)) => true,
        Ok(Err(fs::TryLockError::Error(_))) => false,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    }
}

/// Two directories change places in one moment.
#[cfg(any(target_os = "linux", target_os = "macos"))]
fn exchange(one: &Path, other: &Path) -> io::Result<()> {
    use rustix::fs::{CWD, RenameFlags, renameat_with};
    Ok(renameat_with(CWD, one, CWD, other, RenameFlags::EXCHANGE)?)
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
fn exchange(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Directories of this path that do not exist, the deepest first.
fn missing(path: &Path) -> Vec<PathBuf> {
    let above = path.ancestors();
    let above = above.take_while(|path| !path.as_os_str().is_empty() && !path.exists());
    above.map(Path::to_path_buf).collect()
}

fn is_empty(path: &Path) -> bool {
    fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none())
}

/// Only what is known to be a model is overwritten: a mistyped path must not cost a directory of something else.
fn check_free(target: &Path, overwrite: bool) -> Result<()> {
    let refused = |reason| {
        Err(Error::TargetExists {
            path: target.to_path_buf(),
            reason,
        })
    };
    match fs::metadata(target) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(FileError::Io {
            path: target.to_path_buf(),
            action: "look at the directory",
            source,
        }
        .into()),
        Ok(found) if !found.is_dir() => refused("is not a directory"),
        Ok(_) if is_empty(target) => Ok(()),
        Ok(_) if !overwrite => refused(
            "is not empty: --overwrite (`with_overwrite`) replaces a model that stands there",
        ),
        Ok(_) if !target.join("config.json").is_file() => {
            refused("holds no config.json, so it is no model to overwrite")
        }
        Ok(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

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
    fn what_no_process_holds_is_removed_and_nothing_else() {
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
        // Of two that are in the making, none takes the other for stale.
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

    /// A kill between two renames.
    #[test]
    fn a_model_that_was_moved_away_comes_back() {
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
        // Beside a model it is what that has replaced.
        fs::create_dir(&old).unwrap();
        drop(Staging::new(&target, true).unwrap());
        assert_eq!(names(dir.path()), ["out"]);
    }

    /// Between two renames a reader would find nothing.
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
