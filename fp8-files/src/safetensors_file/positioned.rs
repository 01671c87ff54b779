//! Reads at positions in a file, from several threads at once where the system supports it.
//!
//! Files are not mapped into memory: if a mapped file is truncated, the process is killed.

use std::fmt::Debug;
use std::fs::File;
use std::io::Result;

/// Bytes that are read at positions: those of a local file, or of one on a server.
pub trait ReadAt: Debug + Send + Sync {
    /// Fills `bytes` from position `at`.
    ///
    /// # Errors
    /// If the bytes cannot be read, or end before `bytes` is full.
    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> Result<()>;
}

/// A file that is only read at given positions.
#[derive(Debug)]
pub(super) struct Positioned(#[cfg(unix)] File, #[cfg(not(unix))] std::sync::Mutex<File>);

#[cfg(unix)]
impl Positioned {
    pub(super) fn new(file: File) -> Self {
        Self(file)
    }
}

#[cfg(unix)]
impl ReadAt for Positioned {
    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, bytes, at)
    }
}

#[cfg(not(unix))]
impl Positioned {
    pub(super) fn new(file: File) -> Self {
        Self(file.into())
    }
}

#[cfg(not(unix))]
impl ReadAt for Positioned {
    fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(bytes)
    }
}
