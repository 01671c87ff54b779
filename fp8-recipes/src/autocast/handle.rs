//! Carrying a context to other threads.

use super::context::{Context, Scope, check_thread, current_runs, current_scope};
use super::guard::{AutocastGuard, Membership};
use super::replay::{RunLog, Runs};
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
pub struct AutocastHandle(Scope);

impl AutocastHandle {
    /// The context of the innermost guard on this thread. Without a guard, the handle stands for high precision.
    pub fn current() -> Self {
        Self(current_scope())
    }

    /// The same context, with uses of layers logged in `log`.
    pub(crate) fn logged(&self, log: &Arc<RunLog>) -> Self {
        Self(Scope {
            context: self.0.context.clone(),
            runs: self.0.runs.logged(log),
        })
    }

    /// The same context without its step, for one second run of what `log` has logged.
    pub(crate) fn rerun(&self, log: &Arc<RunLog>) -> Self {
        Self(Scope {
            context: self.without_step(),
            runs: Runs::rerun(log),
        })
    }

    fn without_step(&self) -> Option<Context> {
        let context = self.0.context.as_ref();
        context.map(|context| Context::new(context.settings.clone(), None))
    }

    /// Opens the context on the calling thread.
    ///
    /// # Errors
    /// If the guard that the handle comes from is closed, or the thread is a worker of a rayon pool: see
    /// [`AutocastHandle::run`].
    pub fn open(&self) -> Result<AutocastGuard> {
        check_thread()?;
        let mut scope = self.0.clone();
        // The handle may come from outside of the recomputed function that opens it.
        if scope.runs.is_empty() {
            scope.runs = current_runs();
        }
        if scope.runs.replays() {
            scope.context = self.without_step();
        } else if let Some(session) = scope.context.as_ref().and_then(|own| own.session.as_ref())
            && !session.is_open()
        {
            return Err(GuardError::Closed.into());
        }
        Ok(AutocastGuard::push(scope, Membership::None))
    }

    /// Runs `f` inside the context, on any thread.
    ///
    /// On a worker of a rayon pool (a parallel iterator, `Device::with_context`) `f` runs on a separate thread, while the worker
    /// continues with other tasks, which see no guard. This costs tens of microseconds: acceptable for a forward pass, not for a
    /// row.
    ///
    /// # Errors
    /// If the guard that the handle comes from is closed, or a thread cannot be started.
    pub fn run<R: Send>(&self, f: impl FnOnce() -> R + Send) -> Result<R> {
        let here = || {
            let guard = self.open()?;
            let result = f();
            guard.close()?;
            Ok(result)
        };
        if check_thread().is_ok() {
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
        AutocastHandle(self.scope())
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
