//! Carrying a context to other threads.

use super::context::{Context, can_open_here, check_thread, current, current_runs};
use super::guard::{AutocastGuard, Step};
use super::replay::{RunLog, Runs};
use super::session::Session;
use crate::error::{GuardError, Result};
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, PoisonError};

/// An autocast context for other threads.
///
/// Layers used there belong to the step of the guard that the handle comes from: their scales are updated when that guard closes.
/// After that the handle cannot be opened.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use fp8_recipes::fp8_autocast;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let guard = fp8_autocast("tensorwise")?;
/// let handle = guard.handle();
/// std::thread::scope(|scope| {
///     scope.spawn(|| -> fp8::Result<()> {
///         let inner = handle.open()?;
///         // forward passes of this thread
///         inner.close()?;
///         Ok(())
///     });
/// });
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct AutocastHandle {
    context: Option<Context>,
    runs: Runs,
}

impl AutocastHandle {
    fn session(&self) -> Option<&Arc<Session>> {
        self.context.as_ref()?.session.as_ref()
    }

    /// The context of the innermost guard on this thread. Without a guard, the handle stands for high precision.
    pub fn current() -> Self {
        Self {
            context: current(),
            runs: current_runs(),
        }
    }

    /// The same context, with uses of layers logged in `log`.
    pub(crate) fn logged(&self, log: &Arc<RunLog>) -> Self {
        Self {
            context: self.context.clone(),
            runs: self.runs.logged(log),
        }
    }

    /// The same context without its step, for one second run of what `log` has logged.
    pub(crate) fn rerun(&self, log: &Arc<RunLog>) -> Self {
        let context = self.context.clone();
        Self {
            context: context.map(|context| Context::new(context.settings, None)),
            runs: Runs::rerun(log),
        }
    }

    /// Opens the context on the calling thread.
    ///
    /// # Errors
    /// If the guard that the handle comes from is closed, or the thread is a worker of a rayon pool: see
    /// [`AutocastHandle::run`].
    pub fn open(&self) -> Result<AutocastGuard> {
        check_thread()?;
        // The handle may come from outside of the checkpointed function that opens it.
        let runs = match self.runs.is_empty() {
            true => current_runs(),
            false => self.runs.clone(),
        };
        if runs.replays() {
            let context = self.context.as_ref();
            let context = context.map(|context| Context::new(context.settings.clone(), None));
            return Ok(AutocastGuard::push(context, runs, Step::None));
        }
        match self.session() {
            Some(session) if !session.is_open() => Err(GuardError::Closed.into()),
            _ => Ok(AutocastGuard::push(self.context.clone(), runs, Step::None)),
        }
    }

    /// Runs `f` inside the context, on any thread.
    ///
    /// On a worker of a rayon pool (a parallel iterator, `Device::with_context`) `f` runs on a separate thread, while the worker
    /// continues with other tasks, which see no guard. This costs tens of microseconds: acceptable for a forward pass, not for a
    /// row.
    ///
    /// # Errors
    /// If the guard that the handle comes from is closed, or the system gives no thread.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> Result<R> {
        let here = || {
            let guard = self.open()?;
            let result = f();
            guard.close()?;
            Ok(result)
        };
        if can_open_here() {
            return here();
        }
        let bridge = Bridge::take()?;
        // `install` into another pool is the only way to wait during which a worker keeps serving its own pool. The worker of the
        // other pool only waits for the thread.
        bridge.pool().install(|| {
            std::thread::scope(|scope| {
                let thread = std::thread::Builder::new().name("fp8-autocast".into());
                let thread = thread
                    .spawn_scoped(scope, here)
                    .map_err(GuardError::Thread)?;
                thread.join().unwrap_or_else(|panic| resume_unwind(panic))
            })
        })
    }
}

impl AutocastGuard {
    /// A handle that opens this context on other threads.
    pub fn handle(&self) -> AutocastHandle {
        AutocastHandle {
            context: self.context(),
            runs: self.runs(),
        }
    }
}

/// A pool of one thread, returned to `IDLE` after its use.
struct Bridge(Option<rayon::ThreadPool>);

/// Pools that wait for their next use: as many as were ever in use at the same time.
static IDLE: Mutex<Vec<rayon::ThreadPool>> = Mutex::new(vec![]);

impl Bridge {
    fn take() -> Result<Self> {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match idle {
            Some(pool) => Ok(Self(Some(pool))),
            None => {
                let pool = rayon::ThreadPoolBuilder::new()
                    .num_threads(1)
                    .thread_name(|_| "fp8-autocast-bridge".into());
                let pool = pool.build();
                Ok(Self(Some(pool.map_err(|error| {
                    GuardError::Thread(std::io::Error::other(error))
                })?)))
            }
        }
    }

    fn pool(&self) -> &rayon::ThreadPool {
        match &self.0 {
            Some(pool) => pool,
            None => unreachable!("a bridge has its pool until it is dropped"),
        }
    }
}

impl Drop for Bridge {
    fn drop(&mut self) {
        let mut idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner);
        idle.extend(self.0.take());
    }
}
