//! Products of many rows whose tasks pack what they multiply, in the caches of their own core.
//!
//! Where tiles are fast, operands that were packed by another thread arrive too slowly, and all of them together do not fit into the
//! second-level cache.

use super::super::scratch::Scratch;
use super::kernel::Engine;
use super::layout::{PANEL, ROWS, a_len, padded};
use super::product::{PackedA, Panels, Product};
use super::stage::{self, Stage};
use crate::base::parallel::shared::Shared;
use fp8_core::HighPrecision;
use std::ops::Range;

/// Elements of A that a task packs at a time: 0.9 MB, with padding, of the second-level cache of 2 MiB.
const PACKED: usize = 400 << 10;

/// Tasks of fewer rows may pack up to [`MOST_PACKED`] elements.
const MANY_ROWS: usize = 256;
const MOST_PACKED: usize = 560 << 10;

/// With fewer rows, packing B would take longer than multiplying.
const LEAST_ROWS: usize = 160;

/// Panels that are packed together and whose results are written together: memory reads and writes runs of a few cache lines several times
/// as fast as single ones.
pub(super) const TOGETHER: usize = 4;

/// Results of at least this many bytes are written past the caches: they would not stay there in any case, and each line would be read
/// before it is written.
const PAST_CACHES: usize = 1 << 20;

/// How many multiply-adds take as long as packing one element.
const PACKING: usize = 100;

/// The division of a product into tasks of about equal size.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Grid {
    rows: usize,
    panels: usize,
    /// Rows and panels of a task.
    task: (usize, usize),
}

impl Grid {
    /// The fastest division; None if the sums are too long for a task to pack its rows.
    fn new(rows: usize, panels: usize, k: usize, threads: usize) -> Option<Self> {
        let k = k.max(1);
        let most = (PACKED / k).max(MANY_ROWS.min(MOST_PACKED / k)) / (2 * ROWS) * (2 * ROWS);
        if most < LEAST_ROWS.min(rows) {
            return None;
        }
        let least = rows.div_ceil(most);
        let across = std::iter::successors(Some(1), |across| Some(2 * across))
            .take_while(|&across| across <= panels.min(2 * threads));
        let all = across.flat_map(|across| {
            let enough = threads.div_ceil(across).max(least);
            [least, enough, enough.next_multiple_of(threads), 2 * enough].map(|down| {
                let task_rows = rows.div_ceil(down).next_multiple_of(2 * ROWS);
                Self {
                    rows,
                    panels,
                    task: (task_rows, panels.div_ceil(across)),
                }
            })
        });
        all.min_by_key(|grid| grid.cost(threads))
    }

    fn count(&self) -> usize {
        self.down() * self.panels.div_ceil(self.task.1)
    }

    fn down(&self) -> usize {
        self.rows.div_ceil(self.task.0)
    }

    /// What a thread has to do, in multiply-adds for each index of the sum.
    fn cost(&self, threads: usize) -> usize {
        let (rows, cols) = (self.task.0, self.task.1 * PANEL);
        let task = rows * cols + PACKING * (rows + cols);
        // A thread may come late or be interrupted.
        let wait = if threads > 1 { task / 8 } else { 0 };
        self.count().div_ceil(threads) * task + wait
    }

    /// Rows and panels of a task.
    fn part(&self, task: usize) -> (Range<usize>, Range<usize>) {
        let row = task % self.down() * self.task.0;
        let panel = task / self.down() * self.task.1;
        let rows = row..self.rows.min(row + self.task.0);
        (rows, panel..self.panels.min(panel + self.task.1))
    }
}

impl<T: HighPrecision, E: Engine> Product<'_, T, E> {
    /// Multiplies, unless the sums are too long for this.
    pub(super) fn in_tasks(&self) -> bool {
        let (m, k) = (self.a.kept(), padded(self.k()));
        let Some(grid) = Grid::new(m, self.panels(), k, self.threads) else {
            return false;
        };
        let past_caches = m * self.b.kept() * size_of::<T>() >= PAST_CACHES;
        self.for_each(grid.count(), |task| {
            let (rows, panels) = grid.part(task);
            let mut values = Scratch::new(a_len(rows.len(), k));
            // SAFETY: this task alone uses these values.
            unsafe { self.pack_rows(rows.clone(), rows.clone(), Shared::new(&mut values)) };
            let a = PackedA {
                values: &values,
                first: rows.start,
                rows: rows.len(),
            };
            let together = TOGETHER * Self::WIDTH;
            let mut stage = Stage::new(rows.len(), together, size_of::<T>(), past_caches);
            for first in panels.clone().step_by(TOGETHER) {
                let part = first..panels.end.min(first + TOGETHER);
                let stage = Some((&mut stage, &panels));
                self.block(Some(&a), rows.clone(), part, Panels::BySlice, stage);
            }
            stage::finish();
        });
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_cover_each_part_of_a_product_once() {
        for (rows, panels, k) in [
            (193, 1, 32),
            (2048, 16, 512),
            (1000, 47, 2048),
            (5000, 3, 96),
        ] {
            for threads in [1, 2, 3, 8, 64] {
                let grid = Grid::new(rows, panels, k, threads).unwrap();
                assert!(grid.task.0 * k <= MOST_PACKED, "{grid:?}");
                let mut times = vec![0; rows * panels];
                for task in 0..grid.count() {
                    let (task_rows, task_panels) = grid.part(task);
                    assert!(!task_rows.is_empty() && !task_panels.is_empty());
                    for row in task_rows {
                        for panel in task_panels.clone() {
                            times[row * panels + panel] += 1;
                        }
                    }
                }
                assert!(times.iter().all(|&times| times == 1), "{grid:?}");
            }
        }
        // A task could not pack enough of these rows.
        assert_eq!(Grid::new(2048, 16, 8192, 2), None);
    }

    #[test]
    fn threads_get_equal_shares() {
        let of = |threads| Grid::new(2048, 64, 512, threads).unwrap();
        assert_eq!(of(1).count(), 3);
        assert_eq!(of(2).count() % 2, 0);
        assert_eq!(of(16).count() % 16, 0);
    }
}
