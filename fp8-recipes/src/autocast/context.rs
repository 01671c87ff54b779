//! The guards that are open on a thread.

use super::replay::Runs;
use super::session::Session;
use super::settings::{LayerStep, Mode, Settings};
use super::state::Fp8State;
use crate::config::AttentionProducts;
use crate::error::{GuardError, Result};
use std::cell::RefCell;
use std::sync::Arc;

/// The settings and the step of a guard.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) settings: Settings,
    /// None in high precision.
    pub(super) session: Option<Arc<Session>>,
    runs: Runs,
}

impl Context {
    pub(super) fn new(settings: Settings, session: Option<Arc<Session>>) -> Self {
        Self {
            settings,
            session,
            runs: Runs::default(),
        }
    }

    /// Records the use of a layer and returns how it computes; None in high precision.
    ///
    /// # Errors
    /// If the guard that this context comes from is closed, or a pending update of the model's gradient scales fails.
    pub(crate) fn sign_in(&self, state: &Arc<Fp8State>) -> Result<Option<LayerStep>> {
        if self.settings.mode == Mode::HighPrecision {
            return Ok(None);
        }
        if let Some(step) = self.runs.replayed(state)? {
            return Ok(Some(step));
        }
        let Some(session) = &self.session else {
            return Ok(None);
        };
        let settings = match state.own_config() {
            None => self.settings.clone(),
            Some(config) => Settings {
                config,
                ..self.settings.clone()
            },
        };
        let cells = session.sign_in(state, &settings)?;
        Ok(Some(self.runs.recorded(state, settings, cells)))
    }

    /// The products in FP8 of the attention whose results the layer with this state reads: by the layer's own recipe, or else the
    /// guard's. None in high precision, without state, and while calibrating.
    pub(crate) fn attention(&self, state: Option<&Fp8State>) -> AttentionProducts {
        match state {
            Some(state) if self.settings.mode == Mode::Fp8 => state
                .own_config()
                .map_or(self.settings.config.attention, |own| own.attention),
            _ => AttentionProducts::none(),
        }
    }

    /// Records that a layer has no FP8 state, and whether a preparation has left it out.
    pub(crate) fn note_unprepared(&self, path: Option<&str>, left_out: bool) {
        if let (Mode::Fp8, Some(session)) = (self.settings.mode, &self.session) {
            session.uses().note_layer(path, left_out);
        }
    }

    /// Records that an operator has no FP8 state although no preparation has left it out.
    pub(crate) fn note_operator(&self, path: Option<&str>) {
        let casts = self.settings.mode == Mode::Fp8 && self.settings.config.cast_operators;
        if let (true, Some(session)) = (casts, &self.session) {
            session.uses().note_operator(path);
        }
    }

    /// The features of a group, if modules keep activations in FP8.
    pub(crate) fn kept_groups(&self) -> Option<usize> {
        let fp8 = self.settings.mode == Mode::Fp8;
        (self.settings.config.kept_activations.group_size()).filter(|_| fp8)
    }

    /// Records the bytes that a node has kept in FP8; 0 if its casts left nothing to keep in high precision.
    pub(crate) fn note_kept(&self, bytes: usize) {
        if let Some(session) = &self.session {
            session.kept().note(bytes);
        }
    }

    /// Counts a cast of a layer that has no state of its own.
    pub(crate) fn count_static_cast(&self) {
        if let Some(session) = &self.session {
            session.count_static_cast();
        }
    }

    /// Records that a layer has failed: its guard, if dropped without `close`, then does not count as a step.
    pub(crate) fn note_failure(&self) {
        if let Some(session) = &self.session {
            session.note_failure();
        }
    }
}

/// What is in force on a thread.
#[derive(Debug, Clone, Default)]
pub(super) struct Scope {
    /// None outside of any guard, and for a handle that was taken there.
    pub(super) context: Option<Context>,
    /// The runs of recomputed functions that the thread is in, also where no guard is open.
    pub(super) runs: Runs,
}

pub(super) struct Frame {
    pub(super) id: u64,
    pub(super) scope: Scope,
}

#[derive(Default)]
pub(super) struct ThreadState {
    pub(super) frames: Vec<Frame>,
    pub(super) next_id: u64,
}

thread_local! {
    static THREAD: RefCell<ThreadState> = RefCell::default();
}

/// Calls `f` with the guards of this thread. None while the thread ends and they have already been dropped: destructors of other
/// `thread_local` values may run later.
pub(super) fn on_thread<R>(f: impl FnOnce(&mut ThreadState) -> R) -> Option<R> {
    THREAD.try_with(|thread| f(&mut thread.borrow_mut())).ok()
}

/// What is in force on this thread.
pub(super) fn current_scope() -> Scope {
    let scope = on_thread(|thread| Some(thread.frames.last()?.scope.clone()));
    scope.flatten().unwrap_or_default()
}

/// The innermost guard's context on this thread.
pub(crate) fn current() -> Option<Context> {
    let Scope { context, runs } = current_scope();
    context.map(|context| Context { runs, ..context })
}

/// The runs of recomputed functions that this thread is in.
pub(super) fn current_runs() -> Runs {
    current_scope().runs
}

/// Whether this thread recomputes activations in a backward pass ([`nn::checkpoint`](crate::nn::checkpoint)). Side effects of the
/// function, such as an update of running statistics, have already happened in the forward pass.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{Device, Tensor, Var};
/// use fp8::{is_recomputing, nn::checkpoint};
/// use std::sync::Arc;
/// use std::sync::atomic::{AtomicU32, Ordering};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let batches = Arc::new(AtomicU32::new(0));
/// let count = batches.clone();
/// let x = Var::new(&[1f32, 2.], &Device::Cpu)?;
/// let y = checkpoint(
///     move |x: &Tensor| {
///         if !is_recomputing() {
///             count.fetch_add(1, Ordering::Relaxed);
///         }
///         x.sqr()
///     },
///     x.as_tensor(),
/// )?;
/// y.sum_all()?.backward()?;
/// assert_eq!(batches.load(Ordering::Relaxed), 1);
/// # Ok(()) }
/// ```
pub fn is_recomputing() -> bool {
    current_runs().replays()
}

/// Whether a prepared layer on this thread would compute in FP8 now.
pub fn is_fp8_enabled() -> bool {
    current().is_some_and(|context| context.settings.mode == Mode::Fp8)
}

/// Whether a guard of any mode is open on this thread. Other threads do not inherit it.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{Autocast, fp8_autocast, is_fp8_enabled, is_guard_open};
///
/// let guard = fp8_autocast(Autocast::disabled())?;
/// assert!(is_guard_open() && !is_fp8_enabled());
/// guard.close()?;
/// assert!(!is_guard_open());
/// # Ok::<(), fp8_recipes::Error>(())
/// ```
pub fn is_guard_open() -> bool {
    current().is_some()
}

/// Checks that a guard can open here.
///
/// # Errors
/// On a worker of a rayon pool (see [`super`]), and on a thread that is ending.
pub(super) fn check_thread() -> Result<()> {
    if on_thread(|_| ()).is_none() {
        return Err(GuardError::ThreadEnds.into());
    }
    match rayon::current_thread_index() {
        // A pool of one thread is no exception: its worker runs other tasks while it waits for another pool or yields.
        Some(worker) => Err(GuardError::OnPoolWorker { worker }.into()),
        None => Ok(()),
    }
}
