//! Ending a step, and running a step as a closure.

use super::Autocast;
use super::context::{is_recomputing, on_thread};
use super::ended_step::update_gradients;
use super::guard::fp8_autocast;
use super::job;
use super::session::{Purpose, Session};
use super::settings::Mode;
use super::summary::StepSummary;
use crate::error::{Error, Result};
use fp8_candle::state::StepCells;
use std::sync::Arc;

/// Ends the training step in progress on this thread: updates the delayed scales of inputs, weights and output gradients from the
/// amaxes recorded since the last step ended, and returns what was cast. The guard stays open, so that one guard may enclose a whole
/// loop:
///
/// ```no_run
/// # use fp8_recipes::{end_step, fp8_autocast};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let guard = fp8_autocast("delayed")?;
/// for _ in 0..1000 {
///     // forward, backward, optimizer
///     end_step()?;
/// }
/// guard.close()?;
/// # Ok(()) }
/// ```
///
/// Outside of a training guard it updates the gradient scales of the models that guards of this thread have trained, which
/// otherwise happens when a model is next used.
///
/// # Errors
/// If a reduction over ranks fails; its amaxes are part of the next update.
pub fn end_step() -> Result<StepSummary> {
    if is_recomputing() {
        return Ok(StepSummary::default());
    }
    let session = training_session();
    // The thread's state is not borrowed here, because a reduction over ranks may run the user's code.
    let (mut first, mut tables) = match &session {
        Some(session) => {
            let (tables, done) = session.end_step();
            (done, tables)
        }
        None => (Ok(StepSummary::default()), vec![]),
    };
    for table in job::tables() {
        if !tables.iter().any(|other| Arc::ptr_eq(other, &table)) {
            tables.push(table);
        }
    }
    job::in_order(&mut tables, |table| table);
    for table in &tables {
        let done = update_gradients(table);
        match (&mut first, done) {
            (Ok(summary), Ok(more)) => summary.merge(more),
            (Ok(_), Err(error)) => first = Err(error),
            (Err(_), _) => {}
        }
    }
    if let Some(session) = session {
        job::remember(&tables);
        session.next_step();
    }
    first
}

/// The training step in progress on this thread.
fn training_session() -> Option<Arc<Session>> {
    let session = on_thread(|thread| {
        let frames = thread.frames.iter().rev();
        let mut contexts = frames.filter_map(|frame| frame.scope.context.as_ref());
        contexts.find_map(|context| {
            let session = context.session.clone()?;
            (context.settings.mode == Mode::Fp8 && session.purpose() == Purpose::Training)
                .then_some(session)
        })
    });
    session.flatten()
}

/// What the training step in progress on this thread has recorded of models that await the step of their optimizer, as far as is known,
/// each with the path of a layer.
pub(crate) fn unfinished_steps() -> Vec<(Arc<StepCells>, String)> {
    training_session().map_or_else(Vec::new, |session| session.unfinished())
}

/// Runs `f` inside a guard. On success the guard is closed. On an error the step is discarded, as by
/// [`AutocastGuard::abort`](crate::AutocastGuard::abort), so `?`
/// inside is safe; inside another guard of the same step, the guard only closes.
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::{nn, with_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let (layer, x) = (nn::Linear::new(Tensor::zeros((2, 3), candle_core::DType::F32, &Device::Cpu)?, None),
/// #     Tensor::zeros((4, 3), candle_core::DType::F32, &Device::Cpu)?);
/// let y = with_fp8("delayed", || layer.forward(&x))?;
/// # assert_eq!(y.dims(), [4, 2]);
/// # Ok(()) }
/// ```
///
/// # Errors
/// The error of `f`, or that of opening or closing the guard.
pub fn with_fp8<A, T, E>(autocast: A, f: impl FnOnce() -> Result<T, E>) -> Result<T, E>
where
    A: TryInto<Autocast>,
    Error: From<A::Error>,
    E: From<Error>,
{
    let guard = fp8_autocast(autocast)?;
    match f() {
        Ok(value) => {
            guard.close()?;
            Ok(value)
        }
        Err(error) => {
            guard.abort();
            Err(error)
        }
    }
}
