//! Where the rows of a matrix come from.

use super::scratch::{Plain, Scratch};
use fp8_core::{Format, HighPrecision, ScaleGrid};

/// The rows of a matrix, which may be computed as they are read.
pub(crate) trait MadeRows<T>: Sync {
    /// `len` elements of whole rows from `start` on; `room` may be used for them.
    fn rows<'a>(&'a self, start: usize, len: usize, room: &'a mut Room<T>) -> &'a [T];
}

/// Room for rows, which the thread uses again afterwards.
pub(crate) type Room<T> = Option<Scratch<T>>;

/// A function that writes all of the elements from an index on.
impl<T: Plain, F: Fn(usize, &mut [T]) + Sync> MadeRows<T> for F {
    fn rows<'a>(&'a self, start: usize, len: usize, room: &'a mut Room<T>) -> &'a [T] {
        let values = room.insert(Scratch::new(len));
        self(start, values);
        values
    }
}

/// Rows that are there.
pub(crate) struct Stored<'a, T>(pub(crate) &'a [T]);

impl<T: Sync> MadeRows<T> for Stored<'_, T> {
    fn rows<'a>(&'a self, start: usize, len: usize, _: &'a mut Room<T>) -> &'a [T] {
        &self.0[start..start + len]
    }
}

/// A matrix in codes, whose rows are decoded as they are read.
pub(crate) struct CodedRows<'a> {
    pub(crate) codes: &'a [u8],
    pub(crate) format: Format,
    pub(crate) grid: &'a ScaleGrid,
    pub(crate) dequant_scales: &'a [f32],
}

impl<T: HighPrecision + Plain> MadeRows<T> for CodedRows<'_> {
    fn rows<'a>(&'a self, start: usize, len: usize, room: &'a mut Room<T>) -> &'a [T] {
        let values = room.insert(Scratch::new(len));
        let (codes, row) = (
            &self.codes[start..start + len],
            start / self.grid.cols().max(1),
        );
        fp8_core::decode_rows(
            self.format,
            codes,
            row,
            self.grid,
            self.dequant_scales,
            values,
        );
        values
    }
}
