//! Tasks over the rayon pool that the caller runs in. A single one stays on its thread: handing it to another, and
//! waking that, costs more than small work takes.

use rayon::prelude::*;

/// Runs `task` for each of `count`.
pub(super) fn for_each(count: usize, task: impl Fn(usize) + Send + Sync) {
    if count > 1 && rayon::current_num_threads() > 1 {
        (0..count).into_par_iter().for_each(task);
    } else {
        (0..count).for_each(task);
    }
}

/// Runs `task` for each pair of chunks of `a` and `b`, with its index, and folds what they give with `fold`.
pub(super) fn fold_chunks<A: Sync, B: Send, R: Send>(
    (a, a_len): (&[A], usize),
    (b, b_len): (&mut [B], usize),
    identity: impl Fn() -> R + Send + Sync,
    task: impl Fn(usize, &[A], &mut [B]) -> R + Send + Sync,
    fold: impl Fn(R, R) -> R + Send + Sync,
) -> R {
    if a.len() > a_len && rayon::current_num_threads() > 1 {
        a.par_chunks(a_len)
            .zip(b.par_chunks_mut(b_len))
            .enumerate()
            .map(|(index, (a, b))| task(index, a, b))
            .reduce(identity, fold)
    } else {
        a.chunks(a_len)
            .zip(b.chunks_mut(b_len))
            .enumerate()
            .map(|(index, (a, b))| task(index, a, b))
            .fold(identity(), fold)
    }
}
