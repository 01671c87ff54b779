//! Errors of guards and their handles.

/// Why a guard or a handle cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GuardError {
    /// A guard was opened on a worker of a rayon pool.
    #[error(
        "an autocast guard cannot open on worker {worker} of a rayon pool: while it waits it runs other tasks, which would see the \
         guard. Open it outside of the pool and carry it in with AutocastHandle::run, or use std threads"
    )]
    OnPoolWorker {
        /// Index of the worker in its pool.
        worker: usize,
    },
    /// A handle or an inner guard was used after the guard that it comes from had closed.
    #[error(
        "the autocast guard that this context comes from is closed: its step has ended, open the handle or the inner guard \
         while it lives"
    )]
    Closed,
    /// A guard whose amaxes are reduced over several ranks was dropped, and its thread goes on to another step.
    #[error(
        "the last FP8 autocast guard of this thread was dropped although its amaxes are reduced over several ranks, so its step did \
         not count: end such guards with close(), or with abort() on all ranks, or use with_fp8"
    )]
    Dropped,
    /// A recomputed function uses a layer more often than it did the first time.
    #[error(
        "a checkpointed function uses layer `{path}` more often when it runs again than at first"
    )]
    NotRepeated {
        /// Path of the layer.
        path: String,
    },
    /// The system could not start a thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// A guard was opened by the destructor of a `thread_local` value, while its thread ends.
    #[error("an autocast guard cannot open on a thread that is ending")]
    ThreadEnds,
}
