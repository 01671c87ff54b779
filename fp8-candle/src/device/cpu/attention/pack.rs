//! Packing of tokens as operands.

use super::super::scratch::Scratch;
use super::cast::RowCast;
use super::layout::PANEL;
use super::source::View;
use super::units::{Units, bits};
use crate::base::data::attention::Attention;
use std::ops::Range;

/// Packs tokens of heads.
pub(super) struct Packer<U> {
    units: U,
    /// Cells of a row of features.
    pub(super) steps: usize,
    /// Features, padded to whole panels.
    pub(super) padded: usize,
    /// Tokens in f32.
    buffer: Scratch<f32>,
    /// A panel of keys before it is transposed.
    rows: Scratch<u32>,
    /// A row of features that is rounded.
    rounded: Scratch<f32>,
}

/// Parts of up to [`PANEL`] tokens, each with its distance from the first.
fn parts(tokens: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let starts = (0..tokens.len()).step_by(PANEL);
    starts.map(move |at| {
        let start = tokens.start + at;
        (at, start..tokens.end.min(start + PANEL))
    })
}

/// Tokens as rows of cells where they lie in memory, or in f32 in `buffer`, and from one row to the next.
fn in_place<'a, U: Units>(
    units: U,
    view: &View<'a>,
    at: [usize; 2],
    tokens: Range<usize>,
    buffer: &'a mut [f32],
) -> Option<(&'a [u32], usize)> {
    if !units.takes_f32(view) {
        return units.pairs(view, at, tokens);
    }
    let (values, stride) = view.tokens(at, tokens, buffer).rows();
    Some((bits(values), stride))
}

/// Writes tokens as rows of `steps` cells.
fn write_rows<U: Units>(
    units: U,
    view: &View<'_>,
    at: [usize; 2],
    tokens: Range<usize>,
    [buffer, rounded]: [&mut [f32]; 2],
    (to, steps): (&mut [u32], usize),
) {
    if units.decode_pairs(view, at, tokens.clone(), to) {
        return;
    }
    let from = view.tokens(at, tokens, buffer);
    let Some(format) = view.rounding() else {
        for (row, to) in to.chunks_exact_mut(steps).enumerate() {
            units.cells(from.row(row), to);
        }
        return;
    };
    let cast = RowCast::new(format);
    if units.round_to_pairs(cast, from, to) {
        return;
    }
    for (row, to) in to.chunks_exact_mut(steps).enumerate() {
        rounded.copy_from_slice(from.row(row));
        cast.round(rounded);
        units.cells(rounded, to);
    }
}

/// The columns of `count` rows of `steps` cells, which are `stride` apart, in rows of `padded`; zeros for the rest of [`PANEL`] rows, as
/// far as there is room.
fn write_columns<U: Units>(
    units: U,
    (cells, stride): (&[u32], usize),
    [count, steps, padded]: [usize; 3],
    to: &mut [u32],
) {
    for (row, to) in (0..count).step_by(U::STEP).zip(to.chunks_exact_mut(padded)) {
        let x = &cells[row * stride..][..steps];
        let y = match U::STEP > 1 && row + 1 < count {
            true => &cells[(row + 1) * stride..][..steps],
            false => &[],
        };
        units.columns_of_cells(x, y, to);
    }
    let end = to.len().min(PANEL / U::STEP * padded);
    to[end.min(count.div_ceil(U::STEP) * padded)..end].fill(0);
}

impl<U: Units> Packer<U> {
    pub(super) fn new(units: U, attention: &Attention) -> Self {
        let steps = attention.head_dim.div_ceil(U::STEP);
        Self {
            units,
            steps,
            padded: attention.head_dim.next_multiple_of(PANEL),
            buffer: Scratch::new(PANEL * attention.head_dim),
            rows: Scratch::new(PANEL * steps),
            rounded: Scratch::new(attention.head_dim),
        }
    }

    /// Rows of cells of neighbouring features, `[tokens][steps]`.
    pub(super) fn rows(
        &mut self,
        view: &View<'_>,
        at: [usize; 2],
        tokens: Range<usize>,
        to: &mut [u32],
    ) {
        let (units, steps) = (self.units, self.steps);
        for (first, part) in parts(tokens) {
            let to = &mut to[first * steps..][..part.len() * steps];
            match in_place(units, view, at, part.clone(), &mut self.buffer) {
                Some((cells, stride)) => {
                    for (row, to) in to.chunks_exact_mut(steps).enumerate() {
                        to.copy_from_slice(&cells[row * stride..][..steps]);
                    }
                }
                None => {
                    let buffers = [&mut *self.buffer, &mut *self.rounded];
                    write_rows(units, view, at, part, buffers, (to, steps));
                }
            }
        }
    }

    /// Panels of 32 tokens as columns, whose cells are neighbouring features: `[panels][steps][32]`. With `columns` also what
    /// [`Packer::columns`] gives.
    pub(super) fn panels(
        &mut self,
        view: &View<'_>,
        at: [usize; 2],
        tokens: Range<usize>,
        to: &mut [u32],
        mut columns: Option<&mut [u32]>,
    ) {
        let (units, steps, padded) = (self.units, self.steps, self.padded);
        for (first, part) in parts(tokens) {
            let count = part.len();
            let to = &mut to[first * steps..][..PANEL * steps];
            let rows = in_place(units, view, at, part.clone(), &mut self.buffer);
            let whole = |&(_, stride): &(&[u32], usize)| count == PANEL && stride >= steps;
            let rows = match rows.filter(whole) {
                Some(rows) => rows,
                None => {
                    let (head, tail) = self.rows.split_at_mut(count * steps);
                    let buffers = [&mut *self.buffer, &mut *self.rounded];
                    write_rows(units, view, at, part, buffers, (head, steps));
                    tail.fill(0);
                    (&*self.rows, steps)
                }
            };
            units.transpose(rows.0, rows.1, to);
            if let Some(columns) = &mut columns {
                let to = &mut columns[first / U::STEP * padded..];
                write_columns(units, rows, [count, steps, padded], to);
            }
        }
    }

    /// Rows whose cells are neighbouring tokens, `[tokens / STEP][padded]`.
    pub(super) fn columns(
        &mut self,
        view: &View<'_>,
        at: [usize; 2],
        tokens: Range<usize>,
        to: &mut [u32],
    ) {
        let (units, steps, padded) = (self.units, self.steps, self.padded);
        for (first, part) in parts(tokens) {
            let count = part.len();
            let rows = match in_place(units, view, at, part.clone(), &mut self.buffer) {
                Some(rows) => rows,
                None => {
                    let rows = (&mut self.rows[..count * steps], steps);
                    let buffers = [&mut *self.buffer, &mut *self.rounded];
                    write_rows(units, view, at, part, buffers, rows);
                    (&*self.rows, steps)
                }
            };
            let to = &mut to[first / U::STEP * padded..];
            write_columns(units, rows, [count, steps, padded], to);
        }
    }

    /// What [`Packer::columns`] gives of `count` tokens, from their [`Packer::rows`].
    pub(super) fn columns_of_rows(&self, rows: &[u32], count: usize, to: &mut [u32]) {
        let sizes = [count, self.steps, self.padded];
        write_columns(self.units, (rows, self.steps), sizes, to);
    }

    /// Up to [`PANEL`] tokens as [`Packer::columns`] gives them, in memory or in `to`, and from one row to the next.
    pub(super) fn values<'b>(
        &'b mut self,
        view: &View<'b>,
        at: [usize; 2],
        tokens: Range<usize>,
        to: &'b mut [u32],
    ) -> (&'b [u32], usize) {
        if self.units.takes_f32(view) && view.features() == self.padded {
            let (values, stride) = view.tokens(at, tokens, &mut self.buffer).rows();
            return (bits(values), stride);
        }
        self.columns(view, at, tokens, to);
        (to, self.padded)
    }
}
