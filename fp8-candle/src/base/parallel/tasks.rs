//! Tasks on as many threads as the rayon pool of the caller has, or else the global one (`RAYON_NUM_THREADS`): this thread and
//! the helpers of `pool.rs`.
//!
//! The caller starts at once. Tasks are taken one by one from a counter, so a thread that is delayed leaves them to the
//! others. A single task stays on its thread.

use crate::base::parallel::pool;
use crate::base::parallel::shared::Shared;

/// Runs `task` for each index below `count`.
pub(crate) fn for_each(count: usize, task: impl Fn(usize) + Sync) {
    if count <= 1 {
        (0..count).for_each(task);
        return;
    }
    pool::for_each(rayon::current_num_threads(), count, &task);
}

/// Runs `task` for each chunk of `len` elements of `src` and `dst`, with its index.
pub(crate) fn for_each_chunk<A: Sync, B: Send>(
    src: &[A],
    dst: &mut [B],
    len: usize,
    task: impl Fn(usize, &[A], &mut [B]) + Sync,
) {
    assert_eq!(src.len(), dst.len());
    let dst = Shared::new(dst);
    for_each(src.len().div_ceil(len), |index| {
        let range = index * len..src.len().min((index + 1) * len);
        // SAFETY: the chunks do not overlap, and each index is taken once.
        task(index, &src[range.clone()], unsafe { dst.part(range) });
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_in_every_pool() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = pool.build().unwrap();
            for len in [0, 1, 7, 1000] {
                let src: Vec<usize> = (0..len).collect();
                let run = || {
                    let mut dst = vec![0; len];
                    for_each_chunk(&src, &mut dst, 3, |index, src, dst| {
                        assert_eq!(src[0], index * 3);
                        dst.iter_mut()
                            .zip(src)
                            .for_each(|(dst, src)| *dst += src + 1);
                    });
                    dst
                };
                let expected: Vec<usize> = (1..=len).collect();
                assert_eq!(pool.install(run), expected);
                // From outside any pool.
                assert_eq!(run(), expected);
            }
        }
    }

    #[test]
    fn a_panic_comes_through() {
        let run = || for_each(10, |index| assert!(index != 7));
        assert!(std::panic::catch_unwind(run).is_err());
    }
}
