//! Tasks on as many threads as the rayon pool of the caller has, or else the global one (`RAYON_NUM_THREADS`): this thread and
//! the helpers of `pool.rs`.
//!
//! The caller starts at once. Tasks are taken one by one from a counter, so a thread that is delayed leaves them to the
//! others. A single task stays on its thread.

use crate::base::parallel::pool;

/// Runs `task` for each index below `count`.
pub(crate) fn for_each(count: usize, task: impl Fn(usize) + Sync) {
    match count {
        0 => {}
        1 => task(0),
        _ => pool::for_each(rayon::current_num_threads(), count, &task),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    #[test]
    fn every_task_runs_once_in_every_pool() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = pool.build().unwrap();
            for count in [0, 1, 7, 1000] {
                let run = || {
                    let times: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                    for_each(count, |index| {
                        times[index].fetch_add(1, Ordering::Relaxed);
                    });
                    times.into_iter().all(|times| times.into_inner() == 1)
                };
                assert!(pool.install(run), "{threads} {count}");
                // From outside any pool.
                assert!(run(), "{threads} {count}");
            }
        }
    }

    #[test]
    fn a_panic_comes_through() {
        let run = || for_each(10, |index| assert!(index != 7));
        assert!(std::panic::catch_unwind(run).is_err());
    }
}
