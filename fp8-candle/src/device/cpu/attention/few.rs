//! Attention of a few queries, read from a cache: the queries of all heads that share keys are the rows of one block, and keys
//! and values are packed a little at a time, in the first-level cache.
//!
//! Every sum has the order that it has in `forward.rs`.

use super::super::scratch::Scratch;
use super::block::tiles;
use super::layout::{PANEL, Panel, Rows, Sums};
use super::output::Output;
use super::pack::Packer;
use super::rows::Row;
use super::source::View;
use super::units::{Units, bits};
use crate::base::data::attention::Attention;
use fp8_core::HighPrecision;

/// The most queries of a head of keys for which this is the faster way.
pub(super) const MOST: usize = 64;

/// The queries of a batch entry that read one head of keys.
pub(super) struct Few<'a, U> {
    pub(super) units: U,
    /// The sizes; without dropout.
    pub(super) attention: &'a Attention,
    /// Queries, with batch entry `entry`.
    pub(super) q: View<'a>,
    pub(super) entry: usize,
    /// Keys and values, with batch entry and head `at`.
    pub(super) k: View<'a>,
    pub(super) v: View<'a>,
    pub(super) at: [usize; 2],
}

impl<U: Units> Few<'_, U> {
    /// Writes the results of these queries.
    ///
    /// # Safety
    /// No other task may write them.
    pub(super) unsafe fn run<T: HighPrecision>(&self, result: Output<'_, T>) {
        let (attention, [batch, kv_head]) = (self.attention, self.at);
        let (group, queries) = (attention.heads / attention.kv_heads, attention.queries);
        let heads = kv_head * group..(kv_head + 1) * group;
        let mut packer = Packer::new(self.units, attention);
        let mut session = self.units.session();
        let (steps, padded, rows) = (packer.steps, packer.padded, group * queries);
        let mut q_rows = Scratch::<u32>::new(rows * steps);
        for (i, head) in heads.clone().enumerate() {
            let to = &mut q_rows[i * queries * steps..];
            packer.rows(&self.q, [self.entry, head], 0..queries, to);
        }

        let first = attention.visible(batch, 0).start / PANEL * PANEL;
        let end = attention.visible(batch, queries - 1).end.max(first);
        let panels = (end - first).div_ceil(PANEL);
        // Rows lie in different sets of the cache.
        let stride = (panels + 1) * PANEL;
        let mut scores = Scratch::<f32>::new(rows * stride);
        let mut cells = Scratch::<u32>::new(PANEL * steps);
        for panel in 0..panels {
            let from = first + panel * PANEL;
            packer.panels(
                &self.k,
                self.at,
                from..end.min(from + PANEL),
                &mut cells,
                None,
            );
            for tile in tiles(rows, U::ROWS) {
                let a = Rows {
                    cells: &q_rows[tile.start * steps..],
                    row_stride: steps,
                    step_stride: 1,
                };
                let b = Panel {
                    cells: &cells,
                    stride: PANEL,
                    steps,
                };
                let sums = Sums {
                    values: &mut scores[tile.start * stride + panel * PANEL..],
                    stride,
                    accumulate: false,
                };
                self.units.multiply(&mut session, tile.len(), a, b, sums);
            }
        }

        let scale = attention.softmax_scale as f32;
        let mut totals = vec![0f32; rows];
        for (row, total) in totals.iter_mut().enumerate() {
            let scores = &mut scores[row * stride..][..panels * PANEL];
            let visible = attention.visible(batch, row % queries);
            let visible = visible.start.max(first) - first..visible.end.max(first) - first;
            let mut seen = Row::of(scores, &visible);
            if !visible.is_empty() {
                (_, *total) = seen.exponentials(scale, &[], None);
            }
            self.units.cells_in_place(scores);
        }

        let mut sums = Scratch::<f32>::new(rows * padded);
        sums.fill(0.0);
        let mut columns = Scratch::<u32>::new(PANEL.div_ceil(U::STEP) * padded);
        for from in (first..end).step_by(PANEL) {
            let count = PANEL.min(end - from);
            let (values, between) =
                packer.values(&self.v, self.at, from..from + count, &mut columns);
            let start = (from - first) / U::STEP;
            for feature in (0..padded).step_by(PANEL) {
                for tile in tiles(rows, U::ROWS) {
                    let a = Rows {
                        cells: &bits(&scores)[tile.start * stride + start..],
                        row_stride: stride,
                        step_stride: 1,
                    };
                    let b = Panel {
                        cells: &values[feature..],
                        stride: between,
                        steps: count.div_ceil(U::STEP),
                    };
                    let sums = Sums {
                        values: &mut sums[tile.start * padded + feature..],
                        stride: padded,
                        accumulate: true,
                    };
                    self.units.multiply(&mut session, tile.len(), a, b, sums);
                }
            }
        }
        for (row, total) in totals.into_iter().enumerate() {
            let sums = match total > 0.0 || total.is_nan() {
                true => &sums[row * padded..][..attention.head_dim],
                false => &[],
            };
            let place = [self.entry, heads.start + row / queries, row % queries];
            // SAFETY: the caller guarantees that no other task writes these rows.
            unsafe { result.write(place, sums, 1.0 / total) };
        }
    }
}
