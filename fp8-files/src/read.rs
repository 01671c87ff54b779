//! Opening files that are to be read whole: only regular ones.
//!
//! Opening a named pipe waits for a writer that may never come, and a device may have no end: both would hang a
//! program or fill its memory. Their kind is looked at before they are opened.

pub use crate::error::FileKind;

use crate::error::{Error, Result};
use std::fs::{File, Metadata};
use std::io::Read;
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// [`Error::NotARegularFile`] for a directory, a named pipe, a device or a socket, also behind a symbolic link, and
/// [`Error::Read`] where the system refuses.
pub fn open_regular(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    let io = |source| Error::Read {
        path: path.to_path_buf(),
        source,
    };
    check_regular(path, &std::fs::metadata(path).map_err(io)?)?;
    let file = File::open(path).map_err(io)?;
    // What stood there may have been replaced in between.
    check_regular(path, &file.metadata().map_err(io)?)?;
    Ok(file)
}

/// Longer than any `config.json`, `generation_config.json` or the like: the longest name every expert of every layer. Parsed
/// JSON takes up to 20 times the memory of its text.
pub const MAX_CONFIG: u64 = 16 << 20;

/// The bytes of a regular file of at most `limit` of them.
///
/// # Errors
/// As [`open_regular`]; [`Error::TooLarge`] for a longer file, of which nothing is read.
pub fn read_bytes(path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let io = |source| Error::Read {
        path: path.to_path_buf(),
        source,
    };
    let too_large = || Error::TooLarge {
        path: path.to_path_buf(),
        limit,
    };
    let file = open_regular(path)?;
    let length = file.metadata().map_err(io)?.len();
    if length > limit {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // A file may grow while it is read, so its length does not bound what is read.
    file.take(limit.saturating_add(1))
        .read_to_end(&mut bytes)
        .map_err(io)?;
    match bytes.len() as u64 > limit {
        true => Err(too_large()),
        false => Ok(bytes),
    }
}

/// The text of a regular file of at most `limit` bytes.
///
/// # Errors
/// As [`read_bytes`], and [`Error::Read`] for a file that is not UTF-8.
pub fn read_text(path: impl AsRef<Path>, limit: u64) -> Result<String> {
    let path = path.as_ref();
    String::from_utf8(read_bytes(path, limit)?).map_err(|error| Error::Read {
        path: path.to_path_buf(),
        source: std::io::Error::new(std::io::ErrorKind::InvalidData, error.utf8_error()),
    })
}

/// [`read_text`] of a file that need not be there: `None` without it.
///
/// # Errors
/// As [`read_text`]; a symbolic link that leads nowhere is [`Error::Read`].
pub fn read_text_if_present(path: impl AsRef<Path>, limit: u64) -> Result<Option<String>> {
    let path = path.as_ref();
    match read_text(path, limit) {
        Err(Error::Read { source, .. })
            if source.kind() == std::io::ErrorKind::NotFound
                && path.symlink_metadata().is_err() =>
        {
            Ok(None)
        }
        read => read.map(Some),
    }
}

fn check_regular(path: &Path, metadata: &Metadata) -> Result<()> {
    if metadata.is_file() {
        return Ok(());
    }
    Err(Error::NotARegularFile {
        path: path.to_path_buf(),
        kind: kind(metadata),
    })
}

#[cfg(unix)]
fn kind(metadata: &Metadata) -> FileKind {
    use std::os::unix::fs::FileTypeExt;
    let file_type = metadata.file_type();
    if file_type.is_dir() {
        FileKind::Directory
    } else if file_type.is_fifo() {
        FileKind::NamedPipe
    } else if file_type.is_socket() {
        FileKind::Socket
    } else {
        FileKind::Device
    }
}

#[cfg(not(unix))]
fn kind(metadata: &Metadata) -> FileKind {
    if metadata.is_dir() {
        FileKind::Directory
    } else {
        FileKind::Device
    }
}
