//! Products of many rows whose tasks pack their own rows of A, slice by slice, while B is packed once for all of them.
//!
//! Where values take four bytes, all rows together do not fit into a core's cache. Written to the cache that cores share, and read from
//! it, they came and went more slowly than they are packed.

use super::kernel::Engine;
use super::product::{Panels, Product};
use fp8_core::HighPrecision;
use std::ops::Range;

/// The least and the most rows of a task. A slice of them stays in a second-level cache of 512 KiB, beside the sums of [`COLS`] columns.
const LEAST_ROWS: usize = 48;
const MOST_ROWS: usize = 112;

/// The most columns of a task.
const COLS: usize = 512;

/// How often the same rows may be packed.
const TIMES: usize = 2;

/// Rows of each task for a product of `rows` rows by `cols` columns; None if it would have too few rows or be packed too often.
fn task_rows(rows: usize, cols: usize, threads: usize) -> Option<usize> {
    if cols > TIMES * COLS {
        return None;
    }
    let mut tasks = rows.div_ceil(MOST_ROWS).next_multiple_of(threads);
    // A thread may come late or be interrupted.
    while threads > 1 && tasks < 4 * threads && rows.div_ceil(tasks + threads) >= LEAST_ROWS {
        tasks += threads;
    }
    Some(rows.div_ceil(tasks)).filter(|&rows| rows >= LEAST_ROWS)
}

impl<T: HighPrecision, E: Engine> Product<'_, T, E> {
    /// Rows of each task, if tasks pack their own.
    pub(super) fn own_rows(&self) -> Option<usize> {
        let rows = task_rows(self.a.kept(), self.b.kept(), self.threads);
        rows.filter(|_| self.engine.packs_slices())
    }

    /// Multiplies all rows by these panels of `b`; `task_rows` is from [`Product::own_rows`].
    pub(super) fn in_slices(
        &self,
        task_rows: usize,
        panels: Range<usize>,
        b: Panels<'_, E::Value>,
    ) {
        let (m, task_panels) = (self.a.kept(), COLS / Self::WIDTH);
        let down = m.div_ceil(task_rows);
        self.for_each(down * panels.len().div_ceil(task_panels), |task| {
            let row = task % down * task_rows;
            let panel = panels.start + task / down * task_panels;
            let panels = panel..panels.end.min(panel + task_panels);
            self.block(None, row..m.min(row + task_rows), panels, b, None);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_get_equal_shares_of_rows() {
        for (rows, cols, threads, tasks) in [
            (1024, 256, 1, 10),
            (1024, 256, 2, 10),
            (256, 1024, 2, 4),
            (1024, 256, 16, 16),
            (2048, 512, 3, 21),
        ] {
            let of_task = task_rows(rows, cols, threads).unwrap();
            assert_eq!(rows.div_ceil(of_task), tasks, "{rows}x{cols} {threads}");
            assert!((LEAST_ROWS..=MOST_ROWS).contains(&of_task), "{of_task}");
        }
        // Packed three times; too few rows for each thread.
        assert_eq!(task_rows(1024, 1025, 1), None);
        assert_eq!(task_rows(256, 256, 8), None);
    }
}
