//! Waiting for the server's thread.

use rayon::Yield;
use std::time::Duration;

/// How long a worker sleeps when there is nothing else to do.
const PAUSE: Duration = Duration::from_millis(1);

/// The result of `wait`, which blocks. On a worker of rayon that of `poll`, asked again and again: the model computes on these workers, so
/// one that blocked might wait for itself. In between it does their work.
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
