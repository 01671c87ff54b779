//! Bytes of tensors and of their rows, also of pieces whose rows alternate with those of other pieces.

use super::SafetensorsFile;
use crate::error::{Error, Result};
use std::ops::Range;

impl SafetensorsFile {
    /// The step from row to row of a piece whose rows do not follow each other; None for any other tensor.
    pub(super) fn scattered(&self, name: &str) -> Option<usize> {
        let step = self.pieces.get(name)?.step;
        (step > 1).then_some(step)
    }

    /// The bytes of a tensor, as stored.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if no tensor has that name; [`Error::Read`].
    pub fn bytes(&self, name: &str) -> Result<Vec<u8>> {
        let (begin, end) = self.info(name)?.data_offsets;
        let bytes = self.read_range(begin, end)?;
        self.without_gaps(name, bytes)
    }

    /// The rows of the tensor `name` among `bytes`, which begin with one of them.
    fn without_gaps(&self, name: &str, bytes: Vec<u8>) -> Result<Vec<u8>> {
        let Some(step) = self.scattered(name) else {
            return Ok(bytes);
        };
        let rows = bytes.chunks(self.bytes_of_row(name)?.max(1));
        Ok(rows.step_by(step).flatten().copied().collect())
    }

    fn bytes_of_row(&self, name: &str) -> Result<usize> {
        let info = self.info(name)?;
        let values = info.shape.iter().skip(1).product::<usize>();
        Ok(values * info.dtype.bitsize() / 8)
    }

    /// Some of the bytes of a tensor, by their positions in it; fewer where it ends before.
    ///
    /// # Errors
    /// As [`SafetensorsFile::bytes`].
    pub(crate) fn bytes_in(&self, name: &str, bytes: Range<usize>) -> Result<Vec<u8>> {
        if self.scattered(name).is_some() {
            let all = self.bytes(name)?;
            return Ok(all[bytes.start.min(all.len())..bytes.end.min(all.len())].to_vec());
        }
        let (begin, end) = self.info(name)?.data_offsets;
        let at = |offset: usize| begin.saturating_add(offset).min(end);
        self.read_range(at(bytes.start), at(bytes.end))
    }

    pub(super) fn read_range(&self, begin: usize, end: usize) -> Result<Vec<u8>> {
        self.check_end(end)?;
        let mut bytes = vec![0; end.saturating_sub(begin)];
        self.read_at(begin, &mut bytes)?;
        Ok(bytes)
    }

    /// Where some rows of a tensor are in the file, from the first to the last with what lies between them, and their shape. Rows beyond
    /// the last of the tensor are left out.
    pub(super) fn place_of_rows(
        &self,
        name: &str,
        rows: Range<usize>,
    ) -> Result<((usize, usize), Vec<usize>)> {
        let info = self.info(name)?;
        let (begin, _) = info.data_offsets;
        let mut shape = info.shape.clone();
        let all = shape.first().copied().unwrap_or(1);
        let (first, end) = (rows.start.min(all), rows.end.min(all));
        let (row, step) = (self.bytes_of_row(name)?, self.scattered(name).unwrap_or(1));
        if let Some(rows) = shape.first_mut() {
            *rows = end - first;
        }
        let first = begin + first * step * row;
        let end = match end.checked_sub(1) {
            Some(last) => first.max(begin + (last * step + 1) * row),
            None => first,
        };
        Ok(((first, end), shape))
    }

    /// The bytes of some rows of a tensor.
    pub(crate) fn bytes_of_rows(&self, name: &str, rows: Range<usize>) -> Result<Vec<u8>> {
        let (at, _) = self.place_of_rows(name, rows)?;
        self.without_gaps(name, self.read_range(at.0, at.1)?)
    }

    /// Checks that the file has the data up to offset `end`, before memory is taken for it.
    pub(super) fn check_end(&self, end: usize) -> Result<()> {
        match self.start + end as u64 <= self.length {
            true => Ok(()),
            false => Err(self.invalid(format!(
                "truncated: {} bytes, the header describes {}",
                self.length,
                self.expected_length()
            ))),
        }
    }

    /// Fills `bytes` with the data from offset `at`.
    pub(super) fn read_at(&self, at: usize, bytes: &mut [u8]) -> Result<()> {
        let at = self.start + at as u64;
        self.file
            .read_exact_at(bytes, at)
            .map_err(Error::read(&self.path))
    }
}
