//! Packing of tokens as operands.

use super::super::scratch::Scratch;
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
}

/// Parts of up to [`PANEL`] tokens, each with its distance from the first.
fn parts(tokens: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> {
    let starts = (0..tokens.len()).step_by(PANEL);
    starts.map(move |at| {
        let start = tokens.start + at;
        (at, start..tokens.end.min(start + PANEL))
    })
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
        for (first, part) in parts(tokens) {
            let count = part.len();
            let from = view.tokens(at, part, &mut self.buffer);
            for row in 0..count {
                let to = &mut to[(first + row) * self.steps..][..self.steps];
                self.units.cells(from.row(row), to);
            }
        }
    }

    /// Panels of 32 tokens as columns, whose cells are neighbouring features: `[panels][steps][32]`.
    pub(super) fn panels(
        &mut self,
        view: &View<'_>,
        at: [usize; 2],
        tokens: Range<usize>,
        to: &mut [u32],
    ) {
        let steps = self.steps;
        for (first, part) in parts(tokens) {
            let count = part.len();
            let to = &mut to[first * steps..][..PANEL * steps];
            let rows = match self.units.takes_f32(view) {
                true => {
                    let from = view.tokens(at, part.clone(), &mut self.buffer);
                    let (values, stride) = from.rows();
                    Some((bits(values), stride))
                }
                false => self.units.pairs(view, at, part.clone()),
            };
            let whole = |&(_, stride): &(&[u32], usize)| count == PANEL && stride >= steps;
            if let Some((cells, stride)) = rows.filter(whole) {
                self.units.transpose(cells, stride, to);
                continue;
            }
            let from = view.tokens(at, part, &mut self.buffer);
            for (row, cells) in self.rows.chunks_mut(steps).enumerate() {
                match row < count {
                    true => self.units.cells(from.row(row), cells),
                    false => cells.fill(0),
                }
            }
            self.units.transpose(&self.rows, steps, to);
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
        for (first, part) in parts(tokens) {
            let count = part.len();
            let from = view.tokens(at, part, &mut self.buffer);
            for row in (0..count).step_by(U::STEP) {
                let next = match row + 1 < count {
                    true => from.row(row + 1),
                    false => &[],
                };
                let to = &mut to[(first + row) / U::STEP * self.padded..][..self.padded];
                self.units.columns(from.row(row), next, to, PANEL);
            }
        }
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
