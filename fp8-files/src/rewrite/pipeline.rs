//! Works on several layers at once, in bounded memory.
//!
//! Items start in their order, each as soon as a thread and the memory for it are free. The order in which they finish does not matter,
//! because each has its own place in the output.

use crate::error::{Error, Result};
use std::collections::VecDeque;
use std::num::NonZeroUsize;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// How much may be done at once.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Threads; 0 for all of the machine.
    pub(super) threads: usize,
    /// The largest sum of costs of the items in progress, unless a single item costs more.
    pub(super) memory: u64,
}

impl Limits {
    fn threads(self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
            threads => threads,
        }
    }
}

/// Calls `start` and then `work` for every index of `costs`: `start` in this thread and in order, `work` in any thread.
///
/// # Errors
/// The error of the first index that has one. Nothing is started after an error, and what was started has ended.
pub(super) fn run(
    costs: &[u64],
    limits: Limits,
    mut start: impl FnMut(usize) -> Result<()>,
    work: impl Fn(usize) -> Result<()> + Sync,
) -> Result<()> {
    let threads = limits.threads().min(costs.len());
    if threads <= 1 {
        return (0..costs.len()).try_for_each(|i| {
            start(i)?;
            work(i)
        });
    }
    let shared = Shared::default();
    let started = std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| shared.serve(costs, &work));
        }
        // Also if `start` panics: the scope waits for its threads.
        let _closing = Closing(&shared);
        for (i, cost) in costs.iter().enumerate() {
            let mut state = shared.lock();
            let is_full = |state: &mut State| {
                let busy = state.items > 0;
                busy && (state.items >= threads || state.cost.saturating_add(*cost) > limits.memory)
            };
            while state.failed.is_none() && is_full(&mut state) {
                state = shared.wait(state);
            }
            if state.failed.is_some() {
                break;
            }
            drop(state);
            start(i)?;
            let mut state = shared.lock();
            state.items += 1;
            state.cost += cost;
            state.queue.push_back(i);
            drop(state);
            shared.changed.notify_all();
        }
        Ok(())
    });
    let state = shared.state.into_inner();
    match state.unwrap_or_else(PoisonError::into_inner).failed {
        Some((_, error)) => Err(error),
        None => started,
    }
}

#[derive(Default)]
struct State {
    /// Started, and not yet taken by a thread.
    queue: VecDeque<usize>,
    /// Started, and not finished; and their costs.
    items: usize,
    cost: u64,
    closed: bool,
    /// The first index with an error.
    failed: Option<(usize, Error)>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

impl Shared {
    /// After a panic of another thread the state is whole: every change to it is one statement or under one lock.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        let state = self.changed.wait(state);
        state.unwrap_or_else(PoisonError::into_inner)
    }

    /// What a thread does until all is done.
    fn serve(&self, costs: &[u64], work: &impl Fn(usize) -> Result<()>) {
        loop {
            let mut state = self.lock();
            let i = loop {
                match state.queue.pop_front() {
                    Some(i) => break i,
                    None if state.closed => return,
                    None => state = self.wait(state),
                }
            };
            drop(state);
            let _finished = Finished {
                shared: self,
                cost: costs[i],
            };
            let Err(error) = work(i) else {
                continue;
            };
            let mut state = self.lock();
            if state.failed.as_ref().is_none_or(|(first, _)| i < *first) {
                state.failed = Some((i, error));
            }
        }
    }
}

/// Counts an item as finished, also if it panics: the thread that starts items would wait for it forever.
struct Finished<'a> {
    shared: &'a Shared,
    cost: u64,
}

impl Drop for Finished<'_> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.items -= 1;
        state.cost -= self.cost;
        drop(state);
        self.shared.changed.notify_all();
    }
}

/// Tells the threads that nothing follows.
struct Closing<'a>(&'a Shared);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

    fn failed(i: usize) -> Error {
        Error::MissingAmax {
            path: i.to_string(),
        }
    }

    #[test]
    fn memory_and_order_are_kept() {
        let costs: Vec<u64> = (0..200).map(|i| 1 + i * 37 % 50).collect();
        for threads in [1, 2, 3, 8] {
            for memory in [1, 50, 90, 1000] {
                let limits = Limits { threads, memory };
                let (used, most) = (AtomicU64::new(0), AtomicU64::new(0));
                let (mut order, done) = (vec![], AtomicU64::new(0));
                let start = |i: usize| {
                    order.push(i);
                    most.fetch_max(used.fetch_add(costs[i], SeqCst) + costs[i], SeqCst);
                    Ok(())
                };
                let work = |i: usize| {
                    std::thread::yield_now();
                    used.fetch_sub(costs[i], SeqCst);
                    done.fetch_add(1, SeqCst);
                    Ok(())
                };
                run(&costs, limits, start, work).unwrap();
                assert!(order.iter().copied().eq(0..200) && done.into_inner() == 200);
                let most = most.into_inner();
                assert!(most <= memory.max(50), "{most} of {memory}");
            }
        }
    }

    #[test]
    fn the_first_error_counts_and_ends_all() {
        for threads in [1, 4] {
            let limits = Limits { threads, memory: 4 };
            let mut started = 0;
            let start = |_: usize| {
                started += 1;
                Ok(())
            };
            // The later of two errors occurs first.
            let work = |i: usize| match i {
                10 => {
                    std::thread::sleep(std::time::Duration::from_millis(20));
                    Err(failed(i))
                }
                11 => Err(failed(i)),
                _ => Ok(()),
            };
            let error = run(&[1; 1000], limits, start, work).unwrap_err();
            assert!(error.to_string().contains("`10`"), "{error}");
            assert!(started < 20, "{started}");
            let start = |i: usize| if i == 5 { Err(failed(i)) } else { Ok(()) };
            let error = run(&[1; 9], limits, start, |_| Ok(())).unwrap_err();
            assert!(error.to_string().contains("`5`"), "{error}");
        }
    }

    #[test]
    #[should_panic(expected = "a scoped thread panicked")]
    fn a_panic_ends_all() {
        let limits = Limits {
            threads: 2,
            memory: 1,
        };
        let work = |i: usize| match i {
            3 => panic!("in the middle"),
            _ => Ok(()),
        };
        let _ = run(&[1; 9], limits, |_| Ok(()), work);
    }
}
