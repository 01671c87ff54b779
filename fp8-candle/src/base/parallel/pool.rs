//! Helper threads that stay awake between the loops of a training step.
//!
//! On a virtual machine a sleeping thread takes 50 to 100 us to wake up, as long as many loops of a step take. So a helper that has
//! run out of work looks for more for [`AWAKE`] before it sleeps.
//!
//! A helper that is interrupted by another process in the middle of a task holds its caller up for a whole time slice. So it
//! yields while it looks for work: the other process then runs in the gaps, and the caller goes on alone
//! until the helper is back. A caller that was still held up works without helpers for a while (`pace.rs`).

use crate::base::parallel::pace;
use crate::base::sync::lock;
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long a helper looks for work before it sleeps.
const AWAKE: Duration = Duration::from_millis(2);

/// How long it looks before it yields between looks.
const EAGER: Duration = Duration::from_micros(20);

/// How long a caller waits for the last tasks of its helpers before it yields: they may need its processor.
const CALLER_EAGER: Duration = Duration::from_micros(200);

/// How long a caller waits before it sleeps.
const PATIENT: Duration = Duration::from_millis(20);

/// The tasks of one loop.
type Task<'a> = dyn Fn(usize) + Sync + 'a;

/// One loop in progress. Its caller waits until no helper is in it.
struct Loop {
    task: *const Task<'static>,
    count: usize,
    next: AtomicUsize,
    /// Helpers that may still join; changed under the lock of [`State`].
    wanted: AtomicUsize,
    inside: AtomicUsize,
    /// The waiting thread, and whether it sleeps.
    caller: Thread,
    caller_sleeps: AtomicBool,
    /// Whether a helper has lost its processor in the middle of a task.
    interrupted: AtomicBool,
    panicked: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: the task is `Sync`, and it is called only while its caller waits in `for_each`, which keeps it alive.
unsafe impl Send for Loop {}
// SAFETY: as above.
unsafe impl Sync for Loop {}

impl Loop {
    /// Takes tasks until none is left or one has panicked.
    fn work(&self) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= self.count || self.panicked.load(Ordering::Relaxed) {
                return;
            }
            // SAFETY: the caller of `for_each` waits until all threads have left this function.
            let task = unsafe { &*self.task };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| task(index))) {
                self.panicked.store(true, Ordering::Relaxed);
                lock(&self.panic).get_or_insert(panic);
                return;
            }
        }
    }
}

#[derive(Default)]
struct State {
    loops: Vec<Arc<Loop>>,
    helpers: usize,
    sleeping: usize,
}

/// The helpers of the process.
struct Pool {
    state: Mutex<State>,
    /// Counts loops, so that helpers see a new one without the lock.
    announced: AtomicUsize,
    wake: Condvar,
}

static POOL: Pool = Pool {
    state: Mutex::new(State {
        loops: Vec::new(),
        helpers: 0,
        sleeping: 0,
    }),
    announced: AtomicUsize::new(0),
    wake: Condvar::new(),
};

thread_local! {
    /// Whether this thread runs tasks: a loop within a task runs on its thread alone.
    static WORKING: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Marks this thread as working, until it is dropped.
struct Working;

impl Working {
    fn begin() -> Self {
        WORKING.set(true);
        Self
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        WORKING.set(false);
    }
}

/// Runs `task` for each index below `count`: on this thread, and on up to `threads - 1` helpers as they join. Tasks must not wait
/// for each other.
///
/// # Panics
/// If a task does, with its panic, when all others have ended.
pub(crate) fn for_each(threads: usize, count: usize, task: &Task<'_>) {
    let helpers = threads.min(count).saturating_sub(1);
    if helpers == 0 || WORKING.get() || pace::alone() {
        (0..count).for_each(task);
        return;
    }
    // SAFETY: only the lifetime changes; `Loop::work` is the only reader, and this function returns when all have left it.
    let task = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task) };
    let this = Arc::new(Loop {
        task,
        count,
        next: AtomicUsize::new(0),
        wanted: AtomicUsize::new(helpers),
        inside: AtomicUsize::new(0),
        caller: thread::current(),
        caller_sleeps: AtomicBool::new(false),
        interrupted: AtomicBool::new(false),
        panicked: AtomicBool::new(false),
        panic: Mutex::new(None),
    });
    POOL.begin(&this, helpers);
    {
        let _working = Working::begin();
        this.work();
    }
    let waits = Instant::now();
    POOL.end(&this);
    if this.interrupted.load(Ordering::Relaxed) {
        pace::note(waits.elapsed());
    }
    if let Some(panic) = lock(&this.panic).take() {
        resume_unwind(panic);
    }
}

impl Pool {
    fn begin(&'static self, this: &Arc<Loop>, helpers: usize) {
        let mut state = lock(&self.state);
        state.loops.push(this.clone());
        while state.helpers < helpers {
            let name = format!("fp8-{}", state.helpers);
            let thread = thread::Builder::new().name(name);
            // If the system has no more threads, callers work alone.
            if thread.spawn(|| self.help()).is_err() {
                break;
            }
            state.helpers += 1;
        }
        self.announced.fetch_add(1, Ordering::Release);
        let sleeping = state.sleeping;
        drop(state);
        for _ in 0..sleeping.min(helpers) {
            self.wake.notify_one();
        }
    }

    /// Stops threads from joining, and waits for those that have joined.
    fn end(&self, this: &Arc<Loop>) {
        lock(&self.state)
            .loops
            .retain(|other| !Arc::ptr_eq(other, this));
        // A worker of rayon must not run other tasks of its pool meanwhile (`rayon::yield_now`): they would see what the caller has in
        // thread-locals, such as guards, and could want locks that it holds.
        let empty = || this.inside.load(Ordering::SeqCst) == 0;
        if !look(CALLER_EAGER, PATIENT, empty) {
            this.caller_sleeps.store(true, Ordering::SeqCst);
            while !empty() {
                thread::park();
            }
        }
    }

    /// A loop to join.
    fn join(state: &State) -> Option<Arc<Loop>> {
        let wants = |this: &&Arc<Loop>| {
            this.wanted.load(Ordering::Relaxed) > 0
                && this.next.load(Ordering::Relaxed) < this.count
        };
        let this = state.loops.iter().find(wants)?;
        this.wanted.fetch_sub(1, Ordering::Relaxed);
        this.inside.fetch_add(1, Ordering::Relaxed);
        Some(this.clone())
    }

    /// The loop of a helper.
    fn help(&self) {
        let _working = Working::begin();
        let mut seen = usize::MAX;
        loop {
            let news = || self.announced.load(Ordering::Acquire) != seen;
            look(EAGER, AWAKE, news);
            let mut state = lock(&self.state);
            let mut joined = Self::join(&state);
            while joined.is_none() && self.announced.load(Ordering::Relaxed) == seen {
                state.sleeping += 1;
                state = self
                    .wake
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
                state.sleeping -= 1;
                joined = Self::join(&state);
            }
            seen = self.announced.load(Ordering::Relaxed);
            drop(state);
            if let Some(this) = joined {
                let watch = pace::Watch::begin();
                this.work();
                if watch.is_some_and(|watch| watch.was_interrupted()) {
                    this.interrupted.store(true, Ordering::Relaxed);
                }
                let last = this.inside.fetch_sub(1, Ordering::SeqCst) == 1;
                if last && this.caller_sleeps.load(Ordering::SeqCst) {
                    this.caller.unpark();
                }
            }
        }
    }
}

/// Polls `found` for up to `patience`; after `eager` it yields between polls.
fn look(eager: Duration, patience: Duration, found: impl Fn() -> bool) -> bool {
    let since = Instant::now();
    loop {
        for _ in 0..8 {
            if found() {
                return true;
            }
            std::hint::spin_loop();
        }
        let waited = since.elapsed();
        if waited > patience {
            return false;
        }
        if waited > eager {
            thread::yield_now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_whatever_the_threads() {
        for threads in [1, 2, 3, 8] {
            for count in [0, 1, 2, 7, 1000] {
                let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
                for_each(threads, count, &|index| {
                    runs[index].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn callers_on_many_threads_and_loops_within_tasks() {
        let total = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..6 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        for_each(3, 5, &|_| {
                            for_each(3, 4, &|_| {
                                total.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 6 * 200 * 20);
    }

    #[test]
    fn helpers_that_sleep_are_woken() {
        let total = AtomicUsize::new(0);
        for _ in 0..3 {
            for_each(2, 100, &|_| {
                total.fetch_add(1, Ordering::Relaxed);
            });
            thread::sleep(3 * AWAKE);
        }
        assert_eq!(total.into_inner(), 300);
    }

    #[test]
    fn a_helper_takes_a_part() {
        // Two tasks that wait for each other: one thread alone waits in vain.
        let arrived = AtomicUsize::new(0);
        let deadline = Instant::now() + Duration::from_secs(60);
        for_each(2, 2, &|_| {
            arrived.fetch_add(1, Ordering::SeqCst);
            while arrived.load(Ordering::SeqCst) < 2 {
                assert!(Instant::now() < deadline, "no helper took the other task");
                thread::yield_now();
            }
        });
    }

    #[test]
    fn a_panic_comes_through_and_the_next_loop_works() {
        for _ in 0..20 {
            let run = || for_each(3, 50, &|index| assert!(index != 17, "task {index}"));
            let panic = catch_unwind(run).unwrap_err();
            let text = panic.downcast_ref::<String>().unwrap();
            assert!(text.contains("task 17"), "{text}");
        }
        let total = AtomicUsize::new(0);
        for_each(3, 50, &|_| {
            total.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(total.into_inner(), 50);
        // This thread is no longer marked as working.
        assert!(!WORKING.get());
    }
}
