//! Products of many rows whose tasks pack their own rows of A, slice by slice, while B is packed once for all of them.
//!
//! In f32, all packed rows do not fit into one core's cache. Writing them to the cache that cores share and reading them back takes longer
//! than packing some of them again.

use super::kernel::Engine;
use super::product::{Panels, Product};
use fp8_core::HighPrecision;
use std::ops::Range;

/// The least and the most rows of a task. A slice of them stays in a second-level cache of 512 KiB, beside the sums of [`COLS`] columns.
const LEAST_ROWS: usize = 48;
const MOST_ROWS: usize = 112;

/// The most columns of a task; half of them if its sums are made in segments, which are summed beside their total.
const COLS: usize = 512;

/// The most times the same rows may be packed.
const TIMES: usize = 2;

/// Rows of each task for a product of `rows` rows; None if a task would have too few.
fn task_rows(rows: usize, threads: usize) -> Option<usize> {
    let mut tasks = rows.div_ceil(MOST_ROWS).next_multiple_of(threads);
    // A thread may come late or be interrupted.
    while threads > 1 && tasks < 4 * threads && rows.div_ceil(tasks + threads) >= LEAST_ROWS {
        tasks += threads;
    }
    Some(rows.div_ceil(tasks)).filter(|&rows| rows >= LEAST_ROWS)
}

impl<T: HighPrecision, E: Engine> Product<'_, T, E> {
    /// Rows of each task, if tasks pack their own; `panels_at_once`: how many panels of B are packed at a time.
    pub(super) fn own_rows(&self, panels_at_once: usize) -> Option<usize> {
        let (panels, of_task) = (self.panels(), self.task_panels());
        let parts = (0..panels).step_by(panels_at_once);
        let times = parts.map(|first| panels_at_once.min(panels - first).div_ceil(of_task));
        if !self.engine.packs_slices() || times.sum::<usize>() > TIMES {
            return None;
        }
        task_rows(self.a.kept(), self.threads)
    }

    fn task_panels(&self) -> usize {
        let cols = if self.segment.is_some() {
            COLS / 2
        } else {
            COLS
        };
        cols / Self::WIDTH
    }

    /// Multiplies all rows by these panels of `b`; `task_rows` is from [`Product::own_rows`].
    pub(super) fn in_slices(
        &self,
        task_rows: usize,
        panels: Range<usize>,
        b: Panels<'_, E::Value>,
    ) {
        let (m, task_panels) = (self.a.kept(), self.task_panels());
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
        for (rows, threads, tasks) in [
            (1024, 1, 10),
            (1024, 2, 10),
            (256, 2, 4),
            (1024, 16, 16),
            (2048, 3, 21),
        ] {
            let of_task = task_rows(rows, threads).unwrap();
            assert_eq!(rows.div_ceil(of_task), tasks, "{rows} {threads}");
            assert!((LEAST_ROWS..=MOST_ROWS).contains(&of_task), "{of_task}");
        }
        assert_eq!(task_rows(256, 8), None);
    }
}
