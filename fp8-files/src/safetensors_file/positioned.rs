//! Reads at positions in a file, from several threads at once where the system supports it.
//!
//! Files are not mapped into memory: if a mapped file is truncated, the process is killed.

use std::fs::File;
use std::io::Result;

/// A file that is only read at given positions.
#[derive(Debug)]
pub(super) struct Positioned(#[cfg(unix)] File, #[cfg(not(unix))] std::sync::Mutex<File>);

#[cfg(unix)]
impl Positioned {
    pub(super) fn new(file: File) -> Self {
        Self(file)
    }

    /// Fills `bytes` from position `at`.
    pub(super) fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(&self.0, bytes, at)
    }
}

#[cfg(not(unix))]
impl Positioned {
    pub(super) fn new(file: File) -> Self {
        Self(file.into())
    }

    /// Fills `bytes` from position `at`.
    pub(super) fn read_exact_at(&self, bytes: &mut [u8], at: u64) -> Result<()> {
        use std::io::{Read, Seek, SeekFrom};
        let mut file = self
            .0
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        file.seek(SeekFrom::Start(at))?;
        file.read_exact(bytes)
    }
}
