//! Writes at positions in a file, from several threads at once where the system supports it.

use std::fs::File;
use std::io::{Result, Write};

/// A file that is only written at given positions.
#[derive(Debug)]
pub(super) struct PositionedFile(#[cfg(unix)] File, #[cfg(not(unix))] std::sync::Mutex<File>);

impl PositionedFile {
    pub(super) fn new(file: File) -> Self {
        #[cfg(unix)]
        return Self(file);
        #[cfg(not(unix))]
        return Self(file.into());
    }

    /// A writer from position `at` on.
    pub(super) fn at(&self, at: u64) -> Positioned<'_> {
        Positioned { file: self, at }
    }

    #[cfg(unix)]
    pub(super) fn sync(&self) -> Result<()> {
        self.0.sync_all()
    }

    #[cfg(not(unix))]
    pub(super) fn sync(&self) -> Result<()> {
        self.lock().sync_all()
    }

    #[cfg(unix)]
    fn write_at(&self, bytes: &[u8], at: u64) -> Result<usize> {
        std::os::unix::fs::FileExt::write_at(&self.0, bytes, at)
    }

    #[cfg(not(unix))]
    fn write_at(&self, bytes: &[u8], at: u64) -> Result<usize> {
        use std::io::{Seek, SeekFrom};
        let mut file = self.lock();
        file.seek(SeekFrom::Start(at))?;
        file.write(bytes)
    }

    #[cfg(not(unix))]
    fn lock(&self) -> std::sync::MutexGuard<'_, File> {
        let file = self.0.lock();
        file.unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// A writer that continues where it has stopped.
#[derive(Debug)]
pub(super) struct Positioned<'a> {
    file: &'a PositionedFile,
    at: u64,
}

impl Write for Positioned<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let written = self.file.write_at(bytes, self.at)?;
        self.at += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}
