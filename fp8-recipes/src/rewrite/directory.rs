//! A directory that comes into sight whole or not at all.

use crate::atomic::{FileError, process_token, sync_dir};
use crate::error::{Error, Result};
use std::ffi::OsString;
use std::fs;
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
        check_free(&target, overwrite)?;
        let Some(name) = target.file_name().map(OsString::from) else {
            return Err(FileError::NoName { path: target }.into());
        };
        let parent = match target.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent.to_path_buf(),
            _ => PathBuf::from("."),
        };
        let mut staging = Self {
            path: parent.join(beside(&name)),
            target,
            overwrite,
            made: missing(&parent),
            done: false,
        };
        if let Err(source) = fs::create_dir_all(&parent) {
            return Err(staging.io("make the directory above it", source));
        }
        match fs::create_dir(&staging.path) {
            Ok(()) => Ok(staging),
            Err(source) => {
                // Somebody else's, then.
                staging.path = PathBuf::new();
                Err(staging.io("make a temporary directory beside it", source))
            }
        }
    }

    /// Where files are written meanwhile.
    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// What the directory will be.
    pub(super) fn target(&self) -> &Path {
        &self.target
    }

    /// Puts the directory where it belongs. Where a model is replaced there is a moment between two renames in which
    /// neither stands there; a kill in it leaves the old one beside its place.
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
            Ok(_) => {
                let name = self.target.file_name().unwrap_or_default();
                let old = self.target.with_file_name(beside(name));
                fs::rename(&self.target, &old)
                    .map_err(|source| self.io("move the old directory away", source))?;
                Some(old)
            }
            Err(_) => None,
        };
        if let Err(source) = fs::rename(&self.path, &self.target) {
            if let Some(old) = &old {
                let _ = fs::rename(old, &self.target);
            }
            return Err(self.io("put the new directory there", source));
        }
        self.done = true;
        if let Some(old) = old {
            fs::remove_dir_all(&old)
                .map_err(|source| self.io("remove what stood there before", source))?;
        }
        if let Some(parent) = self.target.parent().filter(|p| !p.as_os_str().is_empty()) {
            sync_dir(parent).map_err(|source| self.io("sync the directory above it", source))?;
        }
        Ok(())
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

/// A name that no other call has had: `.NAME.tmp-PROCESS-COUNT`.
fn beside(name: &std::ffi::OsStr) -> OsString {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    let mut hidden = OsString::from(".");
    hidden.push(name);
    hidden.push(format!(".tmp-{}-{count}", process_token()));
    hidden
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
        Ok(_) if !overwrite => refused("is not empty, and it was not asked to overwrite it"),
        Ok(_) if !target.join("config.json").is_file() => {
            refused("holds no config.json, so it is no model to overwrite")
        }
        Ok(_) => Ok(()),
    }
}
