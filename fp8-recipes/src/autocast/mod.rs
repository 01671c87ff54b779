//! The autocast guard: inside it, prepared layers compute in FP8.
//!
//! ```no_run
//! # use fp8_recipes::{Autocast, fp8_autocast, Recipe};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let guard = fp8_autocast(Autocast::new("tensorwise".parse::<Recipe>()?))?;
//! // forward pass
//! drop(guard);
//! # Ok(()) }
//! ```
//!
//! The guard is bound to its thread (neither Send nor Sync); other threads enter the same context through a
//! [`AutocastHandle`]. Unlike Transformer Engine's it is not process-global: two threads may train two models with
//! two recipes. It decides only whether and by which recipe; the numbers live in the layers.

mod group;
mod session;

pub use group::{ReductionGroup, SingleProcess};
use session::{Group, Session, Use};

use crate::config::{Recipe, ResolvedConfig};
use crate::error::Result;
use crate::state::Fp8State;
use session::PendingGradients;
use std::cell::RefCell;
use std::marker::PhantomData;
use std::sync::Arc;

/// What a guard switches on.
#[derive(Debug, Clone)]
pub struct Autocast {
    /// Compute in FP8. False gives true high precision, also inside an enabled guard.
    pub enabled: bool,
    /// Compute in high precision and record amaxes for static scales; wins over `enabled`.
    pub calibrating: bool,
    /// Record amaxes and update scales. False (validation, generation) casts with the frozen scales and changes
    /// nothing; candle has no global no-grad, so the guard says it.
    pub training: bool,
    /// Which casts happen where.
    pub recipe: Recipe,
    /// Ranks over which amaxes are reduced, if the recipe reduces them.
    pub reduction_group: Option<Arc<dyn ReductionGroup>>,
}

impl Default for Autocast {
    fn default() -> Self {
        Self {
            enabled: true,
            calibrating: false,
            training: true,
            recipe: Recipe::default(),
            reduction_group: None,
        }
    }
}

impl Autocast {
    /// Training with `recipe`.
    pub fn new(recipe: impl Into<Recipe>) -> Self {
        Self {
            recipe: recipe.into(),
            ..Self::default()
        }
    }

    /// High precision.
    pub fn disabled() -> Self {
        Self {
            enabled: false,
            ..Self::default()
        }
    }

    /// Sets `enabled`.
    pub fn enabled(mut self, enabled: bool) -> Self {
        self.enabled = enabled;
        self
    }

    /// Sets `calibrating`.
    pub fn calibrating(mut self, calibrating: bool) -> Self {
        self.calibrating = calibrating;
        self
    }

    /// Sets `training`.
    pub fn training(mut self, training: bool) -> Self {
        self.training = training;
        self
    }

    /// Sets the reduction group.
    pub fn reduction_group(mut self, group: Arc<dyn ReductionGroup>) -> Self {
        self.reduction_group = Some(group);
        self
    }
}

impl<R: Into<Recipe>> From<R> for Autocast {
    fn from(recipe: R) -> Self {
        Self::new(recipe)
    }
}

/// What the innermost guard of a thread says.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub(crate) mode: Mode,
    pub(crate) training: bool,
    pub(crate) config: Arc<ResolvedConfig>,
    group: Group,
    session: Option<Arc<Session>>,
}

/// What a prepared layer does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    HighPrecision,
    Calibrate,
    Fp8,
}

impl Context {
    /// Notes a use of a layer for the update at the end of the step, if this context has one.
    pub(crate) fn sign_in(&self, state: &Arc<Fp8State>) -> Result<()> {
        match &self.session {
            None => Ok(()),
            Some(session) => session.sign_in(Use {
                state: state.clone(),
                config: self.config.clone(),
                group: self.group.clone(),
            }),
        }
    }
}

struct Frame {
    id: u64,
    /// None: a handle taken where no guard was open.
    context: Option<Context>,
}

#[derive(Default)]
struct ThreadState {
    frames: Vec<Frame>,
    next_id: u64,
    gradients: PendingGradients,
}

thread_local! {
    static THREAD: RefCell<ThreadState> = RefCell::default();
}

/// The innermost guard's context on this thread.
pub(crate) fn current() -> Option<Context> {
    THREAD.with_borrow(|thread| thread.frames.last()?.context.clone())
}

/// Whether a prepared layer on this thread would compute in FP8 now.
pub fn is_fp8_enabled() -> bool {
    current().is_some_and(|context| context.mode == Mode::Fp8)
}

/// Opens a guard. Inner guards override outer ones fully; dropping it, also while unwinding, restores what was there.
///
/// Delayed scales of inputs and weights are updated when the outermost enabled guard closes, those of output
/// gradients when the next one opens (or at [`end_step`]).
///
/// # Errors
/// If the recipe is inconsistent, or the pending update of gradient scales fails.
pub fn fp8_autocast(autocast: impl Into<Autocast>) -> Result<AutocastGuard> {
    let autocast = autocast.into();
    let config = Arc::new(autocast.recipe.resolve()?);
    let mode = match (autocast.calibrating, autocast.enabled) {
        (true, _) => Mode::Calibrate,
        (false, true) => Mode::Fp8,
        (false, false) => Mode::HighPrecision,
    };
    // A disabled guard in between does not end the step of the enabled one around it.
    let outer: Vec<Context> = THREAD.with_borrow(|thread| {
        let contexts = thread
            .frames
            .iter()
            .rev()
            .filter_map(|frame| frame.context.as_ref());
        contexts
            .filter(|context| context.mode == Mode::Fp8)
            .cloned()
            .collect()
    });
    let in_step = outer.iter().any(|context| context.training);
    if mode == Mode::Fp8 && autocast.training && !in_step {
        end_step()?;
    }
    let (session, owner) = match (mode, outer.into_iter().find_map(|context| context.session)) {
        (Mode::HighPrecision, _) => (None, false),
        (Mode::Fp8, Some(session)) => (Some(session), false),
        (Mode::Fp8, None) => (Some(Arc::new(Session::default())), true),
        // Calibration ends with its own guard, whatever is around it.
        (Mode::Calibrate, _) => (Some(Arc::new(Session::default())), true),
    };
    let context = Context {
        mode,
        training: autocast.training,
        config,
        group: autocast.reduction_group,
        session,
    };
    Ok(AutocastGuard::push(Some(context), owner))
}

/// Ends a training step now: updates the delayed scales of the output gradients that this thread's last guards have
/// recorded. Otherwise that happens when the next outermost guard opens.
pub fn end_step() -> Result<()> {
    // Not under the borrow: a reduction group may run user code.
    let pending = THREAD.with_borrow_mut(|thread| std::mem::take(&mut thread.gradients));
    pending.update()
}

/// Keeps an autocast context open on this thread.
#[must_use = "the context closes when the guard is dropped"]
#[derive(Debug)]
pub struct AutocastGuard {
    id: u64,
    owner: bool,
    closed: bool,
    not_send: PhantomData<*const ()>,
}

impl AutocastGuard {
    fn push(context: Option<Context>, owner: bool) -> Self {
        let id = THREAD.with_borrow_mut(|thread| {
            thread.next_id += 1;
            let id = thread.next_id;
            thread.frames.push(Frame { id, context });
            id
        });
        Self {
            id,
            owner,
            closed: false,
            not_send: PhantomData,
        }
    }

    /// A handle that opens this context on other threads.
    pub fn handle(&self) -> AutocastHandle {
        AutocastHandle {
            context: THREAD.with_borrow(|thread| {
                thread
                    .frames
                    .iter()
                    .find(|frame| frame.id == self.id)?
                    .context
                    .clone()
            }),
        }
    }

    /// Closes the guard and says what went wrong in the update of the scales; dropping it only logs that.
    pub fn close(mut self) -> Result<()> {
        self.finish()
    }

    fn finish(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let frame = THREAD.with_borrow_mut(|thread| {
            let index = thread.frames.iter().position(|frame| frame.id == self.id)?;
            Some(thread.frames.remove(index))
        });
        let Some(context) = frame.and_then(|frame| frame.context).filter(|_| self.owner) else {
            return Ok(());
        };
        let Some(session) = &context.session else {
            return Ok(());
        };
        if std::thread::panicking() {
            // The step did not happen.
            session.discard();
            return Ok(());
        }
        if context.mode == Mode::Calibrate {
            return session.finish_calibration();
        }
        let pending = session.update()?;
        THREAD.with_borrow_mut(|thread| thread.gradients.extend(pending));
        Ok(())
    }
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::error!(%error, "closing an FP8 autocast guard failed");
        }
    }
}

/// Opens an existing autocast context on another thread, for example inside a private rayon pool.
///
/// Layers used there sign in with the guard that the handle comes from: their scales are updated when that one closes.
#[derive(Debug, Clone)]
pub struct AutocastHandle {
    context: Option<Context>,
}

impl AutocastHandle {
    /// The context of the innermost guard on this thread; without one, opening the handle gives high
    /// precision, as outside of any guard.
    pub fn current() -> Self {
        Self { context: current() }
    }

    /// Opens the context on the calling thread.
    pub fn open(&self) -> AutocastGuard {
        AutocastGuard::push(self.context.clone(), false)
    }
}
