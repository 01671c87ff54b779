//! Casts of values that are kept, in groups of features, while their rows are in a core's cache for other work.

use super::cast::{piece_len, task_len};
use super::fill::zeros;
use super::pages;
use crate::base::parallel::shared::Shared;
use crate::base::parallel::tasks;
use fp8_core::{HighPrecision, ScaleGrid};
use std::mem::MaybeUninit;
use std::ops::Range;

/// A matrix to cast. Each group has its own scale, a power of two from its amax, and lies within a row.
#[derive(Clone, Copy)]
pub(crate) struct Groups<'a, T> {
    pub(crate) x: &'a [T],
    pub(crate) grid: &'a ScaleGrid,
}

impl<T> Groups<'_, T> {
    /// Whether each row can be cast beside one of `other`.
    pub(super) fn fit_beside(&self, other: &ScaleGrid) -> bool {
        let (rows, cols) = (self.grid.rows(), self.grid.cols());
        self.x.len() == rows * cols
            && self.grid.block_rows() == 1
            && rows == other.rows()
            && (other.cols() > 0 || self.x.is_empty())
    }
}

/// The codes of [`Groups`], and their scales.
pub(crate) struct GroupCodes {
    pub(crate) codes: Vec<u8>,
    pub(crate) dequant_scales: Vec<f32>,
}

impl GroupCodes {
    /// The codes of `groups`, whose groups lie within rows.
    pub(crate) fn of<T: HighPrecision>(groups: Groups<'_, T>) -> Self {
        let (rows, cols) = (groups.grid.rows(), groups.grid.cols().max(1));
        let [task, piece] = [task_len(cols), piece_len(cols)].map(|len| len / cols);
        let mut room = Self::room(&groups);
        let casting = Casting::new(groups, &mut room);
        tasks::for_each(rows.div_ceil(task), |index| {
            let rows = index * task..rows.min((index + 1) * task);
            for first in rows.clone().step_by(piece) {
                // SAFETY: each row belongs to one piece of one task.
                unsafe { casting.rows(first..rows.end.min(first + piece)) };
            }
        });
        // SAFETY: the tasks have cast all rows.
        unsafe { room.filled(&groups) }
    }

    /// Room for the codes of `groups`.
    pub(super) fn room<T>(groups: &Groups<'_, T>) -> Self {
        Self {
            codes: pages::vec_for(groups.x.len()),
            dequant_scales: vec![0.; groups.grid.len()],
        }
    }

    /// # Safety
    /// This is the room of `groups`, all of whose rows have been cast.
    pub(super) unsafe fn filled<T>(mut self, groups: &Groups<'_, T>) -> Self {
        // SAFETY: the room is for as many codes, and the caller says that all have been written.
        unsafe { self.codes.set_len(groups.x.len()) };
        self
    }
}

/// The cast of [`Groups`] by several tasks.
pub(super) struct Casting<'a, T> {
    groups: Groups<'a, T>,
    codes: Shared<'a, MaybeUninit<u8>>,
    dequant_scales: Shared<'a, f32>,
}

impl<'a, T: HighPrecision> Casting<'a, T> {
    /// A cast into the room of `groups`.
    pub(super) fn new(groups: Groups<'a, T>, room: &'a mut GroupCodes) -> Self {
        let codes = &mut room.codes.spare_capacity_mut()[..groups.x.len()];
        Self {
            groups,
            codes: Shared::new(codes),
            dequant_scales: Shared::new(&mut room.dequant_scales),
        }
    }

    /// Casts these rows.
    ///
    /// # Safety
    /// No two calls at a time cast the same row.
    pub(super) unsafe fn rows(&self, rows: Range<usize>) {
        let Groups { x, grid } = self.groups;
        let elements = rows.start * grid.cols()..rows.end * grid.cols();
        let scales = rows.start * grid.scale_cols()..rows.end * grid.scale_cols();
        // SAFETY: the codes and scales of these rows, which the caller casts nowhere else.
        let (codes, dequant_scales) = unsafe {
            let codes = self.codes.part(elements.clone());
            (zeros(0, codes), self.dequant_scales.part(scales))
        };
        fp8_core::encode_groups(
            &x[elements],
            grid.cols(),
            grid.block_cols(),
            codes,
            dequant_scales,
        );
    }
}
