//! The guard.

use super::Autocast;
use super::context::{Context, Frame, Scope, check_thread, current_runs, on_thread};
use super::job;
use super::session::{Purpose, Session};
use super::settings::{Mode, Settings};
use super::summary::StepSummary;
use crate::error::{Error, GuardError, Result};
use std::marker::PhantomData;
use std::sync::Arc;

/// Opens a guard. An inner guard replaces the settings of outer ones; dropping it, also while unwinding, restores them.
///
/// The outermost training guard is a step, see [the steps](AutocastGuard#steps).
///
/// # Errors
/// If the recipe is unknown or inconsistent, or the thread is a worker of a rayon pool ([`super::AutocastHandle::run`] works there).
/// [`GuardError::Dropped`] if the thread's last step of several ranks ended by dropping its guard, and no state was loaded since.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::{PrepareOptions, fp8_autocast, nn, prepare_fp8};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// let model = nn::linear(64, 32, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
/// prepare_fp8(&model, &PrepareOptions::default())?;
/// let x = Tensor::randn(0f32, 1., (8, 64), &Device::Cpu)?;
///
/// let guard = fp8_autocast("delayed")?;
/// let y = model.forward(&x)?; // in FP8
/// y.sqr()?.mean_all()?.backward()?;
/// let summary = guard.close()?; // ends the step; `with_fp8` is the same around a closure
/// assert_eq!((summary.layers(), summary.casts()), (1, 3));
/// # Ok(()) }
/// ```
pub fn fp8_autocast<A>(autocast: A) -> Result<AutocastGuard>
where
    A: TryInto<Autocast>,
    Error: From<A::Error>,
{
    check_thread()?;
    let autocast = autocast.try_into()?;
    let config = Arc::new(autocast.recipe.resolve()?);
    let mode = match (autocast.calibrating, autocast.enabled) {
        (true, _) => Mode::Calibrate,
        (false, true) => Mode::Fp8,
        (false, false) => Mode::HighPrecision,
    };
    let wanted = match (mode, autocast.training) {
        (Mode::HighPrecision, _) => None,
        (Mode::Calibrate, _) => Some(Purpose::Calibration),
        (Mode::Fp8, true) => Some(Purpose::Training),
        (Mode::Fp8, false) => Some(Purpose::Evaluation),
    };
    let runs = current_runs();
    // A function that is recomputed has been part of its step already.
    let wanted = wanted.filter(|_| !runs.replays());
    let outer = wanted.and_then(outer_session);
    let (step, session) = match (outer, wanted) {
        (Some(outer), _) => (Membership::Joined(outer.clone()), Some(outer)),
        (None, Some(purpose)) => {
            // One rank alone may evaluate, whatever its last step was.
            if purpose != Purpose::Evaluation && job::take_dropped() {
                return Err(GuardError::Dropped.into());
            }
            let own = Arc::new(Session::new(purpose, autocast.reduction_group.clone()));
            (Membership::Own(own.clone()), Some(own))
        }
        (None, None) => (Membership::None, None),
    };
    let settings = Settings {
        mode,
        training: autocast.training,
        micro_batch: autocast.micro_batch,
        config,
        group: autocast.reduction_group,
        stats: autocast
            .stats
            .or(autocast.training_stats.filter(|_| autocast.training)),
        observer: autocast.cast_observer,
    };
    let context = Some(Context::new(settings, session));
    Ok(AutocastGuard::push(Scope { context, runs }, step))
}

/// The session that a guard of this purpose joins: the innermost fitting one around it, skipping disabled guards.
fn outer_session(purpose: Purpose) -> Option<Arc<Session>> {
    on_thread(|thread| {
        let contexts = thread.frames.iter().rev();
        let mut sessions = contexts
            .filter_map(|frame| frame.scope.context.as_ref())
            .filter(|context| context.settings.mode == Mode::Fp8)
            .filter_map(|context| context.session.clone());
        match purpose {
            // Calibration ends with its own guard, even inside other guards.
            Purpose::Calibration => None,
            Purpose::Training => sessions.find(|session| session.purpose() == Purpose::Training),
            Purpose::Evaluation => sessions.next(),
        }
    })?
}

/// Keeps an autocast context open on this thread.
///
/// # Steps
/// An outermost training guard is one step: when it closes, scales are updated from what its layers recorded.
///
/// | how it ends | the step |
/// |---|---|
/// | [`close`](Self::close) | counts; the summary says what was cast |
/// | dropped | counts, unless a layer inside has failed or amaxes are reduced over several ranks; errors and warnings are only logged |
/// | [`abort`](Self::abort), or dropped by a panic | leaves no trace |
///
/// A guard does not notice when `?` leaves its scope with the error of another function; [`super::with_fp8`] does.
///
/// So **a guard whose amaxes are reduced over several ranks has to be closed**. If it is dropped, the reason may be an error of this rank
/// alone, and the others wait for it in another collective: it must leave them at once, and not wait for them in a reduction. The step
/// leaves no trace, and the next training or calibrating guard of the thread, if there is one, is [`GuardError::Dropped`], unless a training
/// state was loaded in between. The same holds after a failed layer, and after a panic that was caught.
///
/// A guard that is never dropped (`mem::forget`, a leaked box) stays open, and so does its step: later guards of the thread are
/// inside it. If they train, a warning is logged.
#[must_use = "the context closes when the guard is dropped"]
#[derive(Debug)]
pub struct AutocastGuard {
    id: u64,
    step: Membership,
    closed: bool,
    not_send: PhantomData<*const ()>,
}

/// How a guard is part of a step.
#[derive(Debug)]
pub(super) enum Membership {
    /// The step ends with the guard, which holds it because a guard in a `thread_local` may outlive the frames of its thread.
    Own(Arc<Session>),
    /// The step of an outer guard.
    Joined(Arc<Session>),
    /// No step, or the step of a guard on another thread.
    None,
}

/// How a guard ends its step.
enum End {
    Close,
    Abort,
}

impl AutocastGuard {
    pub(super) fn push(scope: Scope, step: Membership) -> Self {
        let id = on_thread(|thread| {
            thread.next_id += 1;
            let id = thread.next_id;
            thread.frames.push(Frame { id, scope });
            id
        });
        Self {
            // No frame has the id 0. `check_thread` has checked that frames exist.
            id: id.unwrap_or(0),
            step,
            closed: false,
            not_send: PhantomData,
        }
    }

    /// What this guard has put in force on its thread.
    pub(super) fn scope(&self) -> Scope {
        let scope = on_thread(|thread| {
            let mut frames = thread.frames.iter();
            Some(frames.find(|frame| frame.id == self.id)?.scope.clone())
        });
        scope.flatten().unwrap_or_default()
    }

    /// Closes the guard and returns what was cast in the step that ends with it. For a guard inside another guard of the same step
    /// the summary is empty.
    ///
    /// # Errors
    /// If the update of the scales fails: in a reduction over ranks, or in a calibration without a valid amax. The context is closed
    /// nevertheless, and after a failed reduction its amaxes are part of the next update.
    pub fn close(mut self) -> Result<StepSummary> {
        self.finish(End::Close)
    }

    /// Closes the guard and discards the step: histories, scales and amaxes are as they were before it, except that the first use
    /// of a model has updated the gradient scales of the step before. A guard inside another guard of the same step only closes.
    pub fn abort(mut self) {
        // Aborting does not fail.
        let _ = self.finish(End::Abort);
    }

    fn finish(&mut self, end: End) -> Result<StepSummary> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(StepSummary::default());
        }
        let frame = on_thread(|thread| {
            let index = thread.frames.iter().position(|frame| frame.id == self.id)?;
            Some(thread.frames.remove(index))
        });
        drop(frame);
        match (&self.step, end) {
            (Membership::None, _) | (Membership::Joined(_), End::Abort) => {
                Ok(StepSummary::default())
            }
            (Membership::Joined(session), End::Close) => {
                session.warn_of_training_on();
                Ok(StepSummary::default())
            }
            (Membership::Own(session), End::Abort) => {
                session.abort();
                Ok(StepSummary::default())
            }
            (Membership::Own(session), End::Close) => {
                let (tables, done) = session.close();
                job::remember(&tables);
                done
            }
        }
    }

    /// Whether a layer has failed in this guard's own step.
    fn has_failed(&self) -> bool {
        matches!(&self.step, Membership::Own(session) if session.has_failed())
    }

    /// Whether the end of this guard's own step waits for other ranks.
    fn waits_for_ranks(&self) -> bool {
        matches!(&self.step, Membership::Own(session) if session.waits_for_ranks())
    }
}

impl Drop for AutocastGuard {
    fn drop(&mut self) {
        if self.closed {
            return;
        }
        let waits_for_ranks = self.waits_for_ranks();
        if std::thread::panicking() {
            // A panic discards the step.
            let _ = self.finish(End::Abort);
        } else if self.has_failed() {
            tracing::warn!(
                "an FP8 autocast guard was dropped after one of its layers has failed: its step does not count; \
                 close() counts it, abort() discards it without this warning"
            );
            let _ = self.finish(End::Abort);
        } else if waits_for_ranks {
            // Perhaps because of an error of this rank alone. The others learn of it when this rank leaves, and until then they wait
            // for it elsewhere: if it waited for them here, all would do so until their deadline.
            tracing::warn!(
                "an FP8 autocast guard whose amaxes are reduced over several ranks was dropped: its step does not count; \
                 close() counts it, abort() discards it without this warning"
            );
            let _ = self.finish(End::Abort);
        } else if let Err(error) = self.finish(End::Close) {
            tracing::error!(%error, "closing an FP8 autocast guard failed");
        }
        if waits_for_ranks {
            job::note_dropped();
        }
    }
}
