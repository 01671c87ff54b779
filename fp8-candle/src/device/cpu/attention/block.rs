//! A block of queries of one head, and its products.

use super::layout::{PANEL, Panel, Rows, Sums};
use super::units::Units;
use crate::base::data::attention::Attention;
use std::ops::Range;

/// Queries of a block; a row of scores is kept for each.
pub(super) const QUERIES: usize = 64;

/// Keys of a weighted sum at a time: their values stay in the first-level cache.
const KEYS: usize = 256;

/// Some queries of one head, and the keys that they see.
pub(super) struct Block {
    pub(super) queries: Range<usize>,
    /// The first key of the first panel.
    pub(super) first_key: usize,
    /// Panels of keys.
    pub(super) panels: usize,
    /// Keys of each query, from `first_key` on.
    visible: [(usize, usize); QUERIES],
}

impl Block {
    /// Block `index` of a head of a batch entry.
    pub(super) fn new(attention: &Attention, batch: usize, index: usize) -> Self {
        let first = index * QUERIES;
        let queries = first..attention.queries.min(first + QUERIES);
        let first_key = attention.visible(batch, first).start / PANEL * PANEL;
        let mut visible = [(0, 0); QUERIES];
        for (visible, query) in visible.iter_mut().zip(queries.clone()) {
            let keys = attention.visible(batch, query);
            *visible = (keys.start - first_key, keys.end - first_key);
        }
        let end = visible[queries.len() - 1].1;
        Self {
            queries,
            first_key,
            panels: end.div_ceil(PANEL),
            visible,
        }
    }

    pub(super) fn rows(&self) -> usize {
        self.queries.len()
    }

    /// The keys of a row, from `first_key` on.
    pub(super) fn visible(&self, row: usize) -> Range<usize> {
        self.visible[row].0..self.visible[row].1
    }

    /// Elements from one row of scores to the next: rows lie in different sets of the cache.
    pub(super) fn stride(&self) -> usize {
        self.panels * PANEL + PANEL
    }

    /// The keys of several rows: those between the first of the first and the last of the last.
    fn seen_by(&self, rows: &Range<usize>) -> Range<usize> {
        self.visible[rows.start].0..self.visible[rows.end - 1].1
    }

    /// `to[row, key]`: products of rows of cells with panels of keys, which begin with `first_key`. What no row of a tile sees
    /// is not written.
    pub(super) fn scores<U: Units>(
        &self,
        (units, session): (U, &mut U::Session),
        steps: usize,
        rows: &[u32],
        panels: &[u32],
        to: &mut [f32],
    ) {
        let stride = self.stride();
        for (panel, cells) in panels.chunks(steps * PANEL).enumerate().take(self.panels) {
            for tile in tiles(self.rows(), U::ROWS) {
                let seen = self.seen_by(&tile);
                if seen.end <= panel * PANEL || seen.start >= (panel + 1) * PANEL {
                    continue;
                }
                let a = Rows {
                    cells: &rows[tile.start * steps..],
                    row_stride: steps,
                    step_stride: 1,
                };
                let b = Panel {
                    cells,
                    stride: PANEL,
                    steps,
                };
                let sums = Sums {
                    values: &mut to[tile.start * stride + panel * PANEL..],
                    stride,
                    accumulate: false,
                };
                units.multiply(session, tile.len(), a, b, sums);
            }
        }
    }

    /// `to[row, feature]`: sums of the rows of `columns`, which begin with `first_key`, with weights `weights[row, key]`, whose
    /// rows of cells are [`Block::stride`] apart.
    pub(super) fn weighted<U: Units>(
        &self,
        (units, session): (U, &mut U::Session),
        padded: usize,
        weights: &[u32],
        columns: &[u32],
        to: &mut [f32],
    ) {
        to[..self.rows() * padded].fill(0.0);
        let all = self.seen_by(&(0..self.rows()));
        for from in (all.start / PANEL * PANEL..all.end).step_by(KEYS) {
            for feature in (0..padded).step_by(PANEL) {
                for tile in tiles(self.rows(), U::ROWS) {
                    let seen = self.seen_by(&tile);
                    let start = seen.start.max(from) / (U::STEP * U::TOGETHER) * U::TOGETHER;
                    let end = seen.end.min(from + KEYS).div_ceil(U::STEP);
                    let end = end.next_multiple_of(U::TOGETHER);
                    if start >= end {
                        continue;
                    }
                    let a = Rows {
                        cells: &weights[tile.start * self.stride() + start..],
                        row_stride: self.stride(),
                        step_stride: 1,
                    };
                    let b = Panel {
                        cells: &columns[start * padded + feature..],
                        stride: padded,
                        steps: end - start,
                    };
                    let sums = Sums {
                        values: &mut to[tile.start * padded + feature..],
                        stride: padded,
                        accumulate: true,
                    };
                    units.multiply(session, tile.len(), a, b, sums);
                }
            }
        }
    }

    /// Cells of pairs of rows, in a panel of weights.
    pub(super) fn steps<U: Units>(&self) -> usize {
        self.rows().div_ceil(U::STEP)
    }

    /// Adds to `to[key, feature]`, which begins with `first_key`, the sums over the block's queries of `weights`, panels of keys
    /// `[panels][steps][32]`, times `columns[query, feature]`.
    pub(super) fn add_to_keys<U: Units>(
        &self,
        (units, session): (U, &mut U::Session),
        padded: usize,
        weights: &[u32],
        columns: &[u32],
        to: &mut [f32],
    ) {
        let steps = self.steps::<U>();
        for (panel, cells) in weights.chunks(steps * PANEL).enumerate().take(self.panels) {
            // Neither end of the visible keys decreases, so the queries that see a panel are neighbours.
            let sees = |row: &usize| {
                let keys = self.visible(*row);
                keys.end > panel * PANEL && keys.start < (panel + 1) * PANEL
            };
            let Some(first) = (0..self.rows()).find(sees) else {
                continue;
            };
            let last = (0..self.rows()).rfind(sees).unwrap_or(first);
            let (first, end) = (first / U::STEP, last / U::STEP + 1);
            for feature in (0..padded).step_by(PANEL) {
                for tile in tiles(PANEL, U::ROWS) {
                    let a = Rows {
                        cells: &cells[first * PANEL + tile.start..],
                        row_stride: 1,
                        step_stride: PANEL,
                    };
                    let b = Panel {
                        cells: &columns[first * padded + feature..],
                        stride: padded,
                        steps: end - first,
                    };
                    let sums = Sums {
                        values: &mut to[(panel * PANEL + tile.start) * padded + feature..],
                        stride: padded,
                        accumulate: true,
                    };
                    units.multiply(session, tile.len(), a, b, sums);
                }
            }
        }
    }
}

/// Rows in tiles of nearly the same height.
pub(super) fn tiles(rows: usize, most: usize) -> impl Iterator<Item = Range<usize>> {
    let count = rows.div_ceil(most);
    (0..count).map(move |i| rows * i / count..rows * (i + 1) / count)
}
