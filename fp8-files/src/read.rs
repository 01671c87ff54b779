//! Opens regular files only.
//!
//! Opening a named pipe waits for a writer that may never come, and a device may have no end: both would hang a program or fill its
//! memory. So the kind of a file is checked before it is opened.

pub use crate::error::FileKind;

use crate::error::{Error, Result};
use std::fs::{File, Metadata};
use std::io::Read;
use std::path::Path;

/// Opens a regular file for reading.
///
/// # Errors
/// [`Error::NotARegularFile`] for a directory, a named pipe, a device or a socket, also behind a symbolic link, and
/// [`Error::Read`] if the system cannot open the file.
pub fn open_regular(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    let io = Error::read(path);
    check_regular(path, &std::fs::metadata(path).map_err(&io)?)?;
    let file = File::open(path).map_err(&io)?;
    // The file may have been replaced in between.
    check_regular(path, &file.metadata().map_err(io)?)?;
    Ok(file)
}

/// A limit above the size of any `config.json` or `generation_config.json`; the longest ones name every expert of every layer. Parsed
/// JSON takes up to 20 times the memory of its text.
pub const MAX_CONFIG: u64 = 16 << 20;

/// The bytes of a regular file of at most `limit` bytes.
///
/// # Errors
/// As [`open_regular`]; [`Error::TooLarge`] for a longer file, which is not read.
pub fn read_bytes(path: impl AsRef<Path>, limit: u64) -> Result<Vec<u8>> {
    let path = path.as_ref();
    let io = Error::read(path);
    let too_large = || Error::TooLarge {
        path: path.to_path_buf(),
        limit,
    };
    let file = open_regular(path)?;
    let length = file.metadata().map_err(&io)?.len();
    if length > limit {
        return Err(too_large());
    }
    let mut bytes = Vec::with_capacity(length as usize);
    // The file may grow while it is read, so its length does not limit the bytes to read.
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
    String::from_utf8(read_bytes(path, limit)?).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let reason = format!(
            "not UTF-8 at byte {at}: convert it, for example by `iconv -f latin1 -t utf-8`"
        );
        Error::read(path)(std::io::Error::new(std::io::ErrorKind::InvalidData, reason))
    })
}

/// [`read_text`] of an optional file: `None` if it does not exist.
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

fn kind(metadata: &Metadata) -> FileKind {
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if metadata.file_type().is_fifo() {
            return FileKind::NamedPipe;
        } else if metadata.file_type().is_socket() {
            return FileKind::Socket;
        }
    }
    match metadata.is_dir() {
        true => FileKind::Directory,
        false => FileKind::Device,
    }
}
