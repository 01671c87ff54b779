//! Replaces several files of one directory atomically.
//!
//! Two renames are not atomic: a kill between them leaves one new file beside one old file. Replacing one symbolic link is, so during the
//! exchange all files are links through one common link:
//!
//! | step | what a reader finds |
//! |---|---|
//! | the new files are written to `.fp8-save-X/new/`, `.fp8-save-X/old/` gets hard links to the old ones, and the link `.fp8-save-X/current` points to `old` | old |
//! | each file is replaced by a link to `.fp8-save-X/current/NAME` | old, through the link or not |
//! | `current` is replaced by a link to `new`, by one rename | old before, new after |
//! | each link is replaced by the new file, moved out of `.fp8-save-X/new/` | new, through the link or not |
//! | `.fp8-save-X` is removed | new |
//!
//! Each step is synced to disk before the next one. After a kill readers find one of the two states; the next save cleans up and keeps
//! that state. Where there are no links (Windows, FAT) the files are renamed one after the other.

#[cfg(test)]
mod tests;

use super::{FileError, fill, is_of_another_process, sync_dir, unique};
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Beginning of the names of directories for new files.
const PREFIX: &str = ".fp8-save-";

type WriteFile<'a> = Box<dyn FnOnce(&mut dyn Write) -> Result<(), FileError> + 'a>;

/// One of the files to replace together.
pub struct Part<'a> {
    name: OsString,
    write: WriteFile<'a>,
}

impl<'a> Part<'a> {
    /// The file called `name`, with the content that `write` writes.
    pub fn new(
        name: impl AsRef<OsStr>,
        write: impl FnOnce(&mut dyn Write) -> Result<(), FileError> + 'a,
    ) -> Self {
        Self {
            name: name.as_ref().to_os_string(),
            write: Box::new(write),
        }
    }
}

/// Replaces or creates files of `directory` atomically: all of them or none. Where there are no links (Windows, FAT) they are renamed one
/// after the other.
///
/// # Errors
/// [`FileError`] naming the file and what failed; the old files are then unchanged.
pub fn replace_together(directory: &Path, parts: Vec<Part<'_>>) -> Result<(), FileError> {
    replace_watched(directory, parts, &mut || {})
}

/// [`replace_together`], with `step` called after each change of the directory.
fn replace_watched(
    directory: &Path,
    parts: Vec<Part<'_>>,
    step: &mut dyn FnMut(),
) -> Result<(), FileError> {
    finish_earlier(directory)?;
    let names: Vec<OsString> = parts.iter().map(|part| part.name.clone()).collect();
    for name in &names {
        check_replaceable(&directory.join(name))?;
    }
    let first = directory.join(names.first().map_or(OsStr::new(""), |name| name));
    let stage = Stage::create(directory, &first)?;
    step();
    for part in parts {
        let path = directory.join(&part.name);
        write_new(&path, &stage.path.join("new").join(&part.name), part.write)?;
        step();
    }
    let io = |action| FileError::io(&first, action);
    sync_dir(&stage.path.join("new")).map_err(io("sync the new files"))?;

    if stage.link_old(&names).is_ok() {
        step();
        for name in &names {
            stage.put_link(name).map_err(FileError::io(
                &directory.join(name),
                "put a link in place of it",
            ))?;
            step();
        }
        sync_dir(directory).map_err(io("sync the directory"))?;
        stage.show("new").map_err(io("show the new files"))?;
        step();
    }
    for name in &names {
        let path = directory.join(name);
        fs::rename(stage.path.join("new").join(name), &path)
            .map_err(FileError::io(&path, "replace the old file"))?;
        step();
    }
    sync_dir(directory).map_err(io("sync the directory"))
}

/// Fails unless `path` is free, a regular file, or a link, which is replaced itself.
fn check_replaceable(path: &Path) -> Result<(), FileError> {
    match fs::symlink_metadata(path) {
        Ok(metadata) if metadata.is_file() || metadata.is_symlink() => Ok(()),
        Ok(_) => Err(FileError::WrongKind {
            path: path.to_path_buf(),
            expected: "regular file",
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(FileError::io(path, "look at the old file")(error)),
    }
}

/// Writes a new file with the permissions of the file that it will replace.
fn write_new(path: &Path, temporary: &Path, write: WriteFile<'_>) -> Result<(), FileError> {
    let file = File::create_new(temporary)
        .map_err(FileError::io(path, "create a temporary file for it"))?;
    let old = fs::metadata(path).ok().filter(|old| old.is_file());
    fill(path, file, old.map(|old| old.permissions()), write)
}

/// The directory of the new files. When dropped, links through it are replaced by the files they lead to, and it is removed. That undoes
/// an unfinished exchange, or completes one whose `current` leads to `new`.
struct Stage {
    directory: PathBuf,
    name: OsString,
    path: PathBuf,
}

impl Stage {
    fn create(directory: &Path, first: &Path) -> Result<Self, FileError> {
        let name = unique(PREFIX);
        let io = FileError::io(first, "create a temporary directory beside it");
        let path = directory.join(&name);
        fs::create_dir(&path).map_err(&io)?;
        let stage = Self {
            directory: directory.to_path_buf(),
            name,
            path,
        };
        fs::create_dir(stage.path.join("new")).map_err(io)?;
        Ok(stage)
    }

    /// Gives the old files a second name and points `current` to them. Fails where there are no links.
    fn link_old(&self, names: &[OsString]) -> io::Result<()> {
        let old = self.path.join("old");
        fs::create_dir(&old)?;
        for name in names {
            let path = self.directory.join(name);
            match fs::symlink_metadata(&path) {
                Ok(metadata) if metadata.is_symlink() => {
                    // A relative link would lead elsewhere from here.
                    if let Ok(target) = fs::canonicalize(&path) {
                        symlink(&target, &old.join(name))?;
                    }
                }
                Ok(_) => fs::hard_link(&path, old.join(name))?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        sync_dir(&old)?;
        self.show("old")
    }

    /// Points `current` to one of the two states.
    fn show(&self, state: &str) -> io::Result<()> {
        let next = self.path.join("next");
        symlink(Path::new(state), &next)?;
        fs::rename(next, self.path.join("current"))?;
        sync_dir(&self.path)
    }

    /// Replaces a file of the directory by a link through `current` to the file of that name.
    fn put_link(&self, name: &OsStr) -> io::Result<()> {
        let link = self.path.join("link");
        symlink(&Path::new(&self.name).join("current").join(name), &link)?;
        fs::rename(link, self.directory.join(name))
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // If this fails, the next save tries again.
        let _ = finish(&self.directory, &self.name);
    }
}

/// Finishes the saves that killed processes left in `directory`.
fn finish_earlier(directory: &Path) -> Result<(), FileError> {
    let io = |action| FileError::io(directory, action);
    let entries = fs::read_dir(directory).map_err(io("list the directory"))?;
    for entry in entries {
        let name = entry.map_err(io("list the directory"))?.file_name();
        if is_of_another_process(&name, OsStr::new(PREFIX)) {
            finish(directory, &name).map_err(io("finish what an earlier save has left"))?;
        }
    }
    Ok(())
}

/// Replaces every link through a stage by the file it leads to, then removes the stage.
fn finish(directory: &Path, stage: &OsStr) -> io::Result<()> {
    let path = directory.join(stage);
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        if !target.starts_with(stage) {
            continue;
        }
        let shown = path.join("current").join(entry.file_name());
        let copy = path.join("copy");
        remove_if_there(&copy)?;
        match fs::symlink_metadata(&shown) {
            Ok(metadata) if metadata.is_symlink() => symlink(&fs::read_link(&shown)?, &copy)?,
            Ok(_) => fs::hard_link(&shown, &copy)?,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                // The old state has no such file.
                fs::remove_file(entry.path())?;
                continue;
            }
            Err(error) => return Err(error),
        }
        fs::rename(copy, entry.path())?;
    }
    sync_dir(directory)?;
    fs::remove_dir_all(path)
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(not(unix))]
fn symlink(_: &Path, _: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}
