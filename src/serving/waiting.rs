//! Waiting for the server's thread.

use rayon::Yield;
use std::time::Duration;

/// How long a worker sleeps when there is nothing else to do.
const PAUSE: Duration = Duration::from_millis(1);

/// The result of `wait`, which blocks. A worker of rayon calls `poll` again and again instead, and does other tasks of its pool in between:
/// the model computes on these workers, so a blocked one might wait for itself.
pub(super) fn wait_for<T>(wait: impl FnOnce() -> T, mut poll: impl FnMut() -> Option<T>) -> T {
    if rayon::current_thread_index().is_none() {
        return wait();
    }
    loop {
        if let Some(result) = poll() {
            return result;
        }
        if rayon::yield_now() != Some(Yield::Executed) {
            std::thread::sleep(PAUSE);
        }
    }
}
