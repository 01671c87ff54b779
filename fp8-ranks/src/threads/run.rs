//! Runs a function on every rank.

use super::engine::ThreadEngine;
use super::fault::Fault;
use super::hub::Hub;
use crate::error::Failure;
use crate::group::{GroupOptions, ProcessGroup};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::thread;

/// A job of threads with options.
///
/// ```
/// use fp8_ranks::threads::{Fault, Threads};
/// use std::time::Duration;
///
/// let job = Threads::new(3).with_deadline(Duration::from_secs(60)).with_fault(1, 0, Fault::Error);
/// for result in job.run(|group| group.barrier()) {
///     // No rank waits for its deadline.
///     assert!(result.expect("no panic").is_err());
/// }
/// ```
#[derive(Debug, Clone)]
#[must_use]
pub struct Threads {
    ranks: usize,
    options: GroupOptions,
    faults: Vec<(usize, usize, Fault)>,
}

impl Threads {
    /// A job with this number of ranks, at least one.
    pub fn new(ranks: usize) -> Self {
        Self {
            ranks: ranks.max(1),
            options: GroupOptions::default(),
            faults: vec![],
        }
    }

    /// With the group's options.
    pub fn with_options(mut self, options: GroupOptions) -> Self {
        self.options = options;
        self
    }

    /// With another deadline.
    pub fn with_deadline(mut self, deadline: std::time::Duration) -> Self {
        self.options.deadline = deadline;
        self
    }

    /// Something goes wrong at the `at`-th collective (from 0) that `rank` starts, over all its groups. An `all_reduce` in rank order and a
    /// `broadcast_bytes` are two collectives.
    pub fn with_fault(mut self, rank: usize, at: usize, fault: Fault) -> Self {
        self.faults.push((rank, at, fault));
        self
    }

    /// Calls `rank` on every rank with the group of all, named "world". The results, in the order of ranks, are errors for ranks that
    /// panicked.
    pub fn run<T: Send>(&self, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<thread::Result<T>> {
        let hub = Hub::new(self.ranks);
        let one = |this: usize| {
            let faults = self.faults.iter().filter(|(rank, ..)| *rank == this);
            let faults = faults.map(|(_, at, fault)| (*at, *fault)).collect();
            let engine = ThreadEngine::new(Arc::clone(&hub), this, self.ranks, faults);
            let result = catch_unwind(AssertUnwindSafe(|| {
                let group = ProcessGroup::new(Arc::new(engine), "world", self.options);
                rank(group.unwrap_or_else(|error| panic!("{error}")))
            }));
            if let Err(panic) = &result {
                hub.break_for_all(Failure::Rank {
                    rank: this,
                    message: format!("it panicked: {}", message(&**panic)).into(),
                });
            }
            hub.leave(this);
            result
        };
        thread::scope(|scope| {
            let one = &one;
            let started = (0..self.ranks).map(|rank| {
                let name = thread::Builder::new().name(format!("rank {rank}"));
                let started = name.spawn_scoped(scope, move || one(rank));
                // The threads that have started would wait for it.
                started.inspect_err(|error| {
                    hub.break_for_all(Failure::Rank {
                        rank,
                        message: format!("its thread cannot be started: {error}").into(),
                    });
                })
            });
            let started: Vec<_> = started.collect();
            let joined = started.into_iter().map(|thread| match thread {
                Ok(thread) => thread.join().and_then(|result| result),
                Err(error) => Err(Box::new(error) as Box<dyn Any + Send>),
            });
            joined.collect()
        })
    }
}

fn message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("without a message")
}

/// Calls `rank` on this number of ranks, with the group of all. The results are in the order of ranks.
///
/// # Panics
/// If a rank panics.
pub fn run<T: Send>(ranks: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
    let results = Threads::new(ranks).run(rank);
    let results = results.into_iter().map(|result| match result {
        Ok(result) => result,
        Err(panic) => resume_unwind(panic),
    });
    results.collect()
}
