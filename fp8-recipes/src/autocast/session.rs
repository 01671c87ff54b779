//! What the guards of one step share: the layers that were used since the outermost guard opened.

use super::beginnings::Beginnings;
use super::ended_step::{EndedStep, UsedLayer};
use super::job::{Job, has_others, in_order};
use super::kept::KeptBytes;
use super::settings::{Mode, Settings};
use super::state::{Fp8State, delayed_rule};
use super::summary::StepSummary;
use super::uses::Uses;
use crate::config::{ResolvedConfig, ScalingType};
use crate::error::{GuardError, Result};
use fp8_candle::StateTable;
use fp8_candle::state::{ReductionGroup, StepCells};
use fp8_candle::weight_version::ThreadSteps;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The purpose of the guards of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Purpose {
    Training,
    Evaluation,
    Calibration,
}

/// Shared by an outermost guard and the guards inside it.
#[derive(Debug)]
pub(super) struct Session {
    purpose: Purpose,
    /// Steps of parameters on the thread of the outermost guard.
    noted: ThreadSteps,
    state: Mutex<Progress>,
    beginnings: Beginnings,
    failed: AtomicBool,
    /// Whether the step has used a layer whose amaxes are reduced over several ranks.
    reduces: AtomicBool,
    uses: Uses,
    static_casts: AtomicU64,
    kept: KeptBytes,
    warned: AtomicBool,
}

#[derive(Debug)]
struct Progress {
    closed: bool,
    steps: Vec<Arc<StepCells>>,
    /// Layers that signed in since the last step ended, by address of their state.
    used: HashMap<usize, UsedLayer>,
    job: Job,
    /// Whether the gradient scales of the step before are updated in every table that reduces over ranks.
    began: bool,
    /// [`Session::noted`] when the step first used a model.
    noted_before: u64,
}

impl Session {
    /// The session of a guard with this group, which is opened now on this thread.
    pub(super) fn new(purpose: Purpose, group: Option<Arc<dyn ReductionGroup>>) -> Self {
        let progress = Progress {
            closed: false,
            steps: vec![],
            used: HashMap::new(),
            job: Job::new(group),
            began: false,
            noted_before: 0,
        };
        Self {
            purpose,
            noted: ThreadSteps::of_this_thread(),
            state: Mutex::new(progress),
            beginnings: Beginnings::default(),
            failed: AtomicBool::new(false),
            reduces: AtomicBool::new(false),
            uses: Uses::default(),
            static_casts: AtomicU64::new(0),
            kept: KeptBytes::default(),
            warned: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn purpose(&self) -> Purpose {
        self.purpose
    }

    pub(super) fn is_open(&self) -> bool {
        !self.lock().closed
    }

    pub(super) fn note_failure(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether a layer has failed in a session that has something to forget.
    pub(super) fn has_failed(&self) -> bool {
        self.purpose != Purpose::Evaluation && self.failed.load(Ordering::Relaxed)
    }

    /// Whether the end of the step reduces amaxes over several ranks, and so waits for all of them.
    pub(super) fn waits_for_ranks(&self) -> bool {
        let of_earlier_steps =
            || self.purpose == Purpose::Training && self.lock().job.waits_for_ranks();
        self.reduces.load(Ordering::Relaxed) || of_earlier_steps()
    }

    /// What its guards have used.
    pub(super) fn uses(&self) -> &Uses {
        &self.uses
    }

    pub(super) fn count_static_cast(&self) {
        self.uses.note_served();
        self.static_casts.fetch_add(1, Ordering::Relaxed);
    }

    /// What nodes keep in FP8 for their backward pass.
    pub(super) fn kept(&self) -> &KeptBytes {
        &self.kept
    }

    /// Records the use of a layer; returns the cells of the layer's table.
    pub(super) fn sign_in(
        &self,
        layer: &Arc<Fp8State>,
        settings: &Settings,
    ) -> Result<Arc<StepCells>> {
        self.kept.note_use(settings);
        let table = layer.table();
        let is_known = || {
            let state = self.lock();
            let mut known = state.steps.iter().map(|step| step.table());
            match state.closed {
                true => Err(GuardError::Closed.into()),
                false => Ok(known.any(|known| Arc::ptr_eq(known, table))),
            }
        };
        // Dropped when the table is known.
        let begins = match self.purpose {
            Purpose::Training => self.beginnings.claim(table, is_known)?,
            Purpose::Evaluation | Purpose::Calibration => None,
        };
        if begins.is_some() {
            self.begin()?;
            // The backward pass of the model's last step is over. The lock is not held here, because a reduction over ranks
            // may run the user's code.
            table.update_gradients()?;
            table.begin_step()?;
        }
        let trains = settings.mode == Mode::Fp8 && settings.training;
        let mut state = self.lock();
        if state.closed {
            return Err(GuardError::Closed.into());
        }
        let rows = layer.rows_end();
        let known = (state.steps.iter().rev())
            .find(|step| {
                let same = Arc::ptr_eq(step.table(), table) && step.rows() >= rows;
                // Inf and NaN in an evaluation within a training step must not veto the step, so it has cells of its own.
                same && step.mark().is_some() == trains
            })
            .cloned();
        let step = match known {
            Some(step) => step,
            // The first use of the table, or rows have come since.
            None => {
                let step = match trains {
                    true => StepCells::training(table)?,
                    false => StepCells::new(table)?,
                };
                if state.steps.is_empty() {
                    state.noted_before = self.noted.get();
                }
                state.steps.push(step.clone());
                step
            }
        };
        self.uses.note_prepared();
        let key = Arc::as_ptr(layer) as usize;
        let again = state.used.get(&key).is_some_and(|before| {
            Arc::ptr_eq(&before.config, &settings.config)
                && same_group(&before.group, &settings.group)
                && (before.noted || !trains)
        });
        if !again {
            let trained = trains && note_rules(&step, layer, settings);
            let calibrates = self.purpose == Purpose::Calibration;
            if trained || calibrates && has_others(settings.group.as_ref()) {
                self.reduces.store(true, Ordering::Relaxed);
            }
            let before = state.used.get(&key);
            let noted = trains || before.is_some_and(|before| before.noted);
            let before = before.is_some_and(|before| before.trained);
            let used = UsedLayer {
                state: layer.clone(),
                config: settings.config.clone(),
                group: settings.group.clone(),
                noted,
                trained: before || trains && !is_static(&settings.config),
            };
            state.used.insert(key, used);
        }
        Ok(step)
    }

    /// Updates the gradients of the step before in every table that reduces over ranks, whether this rank uses it now or not: once
    /// a step, and on all ranks before anything else of the step is reduced.
    fn begin(&self) -> Result<()> {
        let tables = {
            let mut state = self.lock();
            if std::mem::replace(&mut state.began, true) {
                return Ok(());
            }
            state.job.reducing()
        };
        for table in tables {
            table.update_gradients()?;
        }
        Ok(())
    }

    /// Ends the session; returns its tables and what was cast. Finishes every table; returns the first error.
    pub(super) fn close(&self) -> (Vec<Arc<StateTable>>, Result<StepSummary>) {
        let began = self.begin_unused();
        let ended = self.take(true);
        let done = match self.purpose {
            Purpose::Training => began.and(ended.commit()),
            Purpose::Evaluation => ended.report(),
            Purpose::Calibration => ended.calibrate(),
        };
        self.count_step();
        (ended.tables(), self.with_static_casts(done))
    }

    /// Adds the casts of layers without state to a summary, and warns of what stayed in high precision.
    fn with_static_casts(&self, done: Result<StepSummary>) -> Result<StepSummary> {
        let static_casts = self.static_casts.swap(0, Ordering::Relaxed);
        let mut summary = done?;
        summary.casts += static_casts;
        summary.kept_bytes += self.kept.take();
        // With a group, another rank may have used what this one has not.
        let expected = self.purpose != Purpose::Calibration && !self.lock().job.has_group();
        self.uses.warn(expected);
        Ok(summary)
    }

    /// The parts of the step in progress whose models await the step of their optimizer, as far as is known, each with the path of a
    /// layer. Empty once that of any model has come: others, such as a frozen teacher, may have none. What the guard's thread has noted of
    /// other parameters counts too: those of adapters may be unknown to the models.
    pub(super) fn unfinished(&self) -> Vec<(Arc<StepCells>, String)> {
        let state = self.lock();
        let path = |step: &Arc<StepCells>| {
            let used = state.used.values().map(|used| &used.state);
            let own = used.filter(|state| Arc::ptr_eq(state.table(), step.table()));
            let first = own.map(|state| state.path()).min();
            first.unwrap_or_default().to_string()
        };
        let noted = self.noted.get() != state.noted_before;
        if noted || state.steps.iter().any(|step| step.has_ended()) {
            return vec![];
        }
        let trains = |step: &&Arc<StepCells>| step.casts() > 0 && step.mark().is_some();
        state
            .steps
            .iter()
            .filter(trains)
            .map(|step| (step.clone(), path(step)))
            .collect()
    }

    /// Warns once, when an inner guard closes, that weights have changed although the step has not ended.
    pub(super) fn warn_of_training_on(&self) {
        let changed = |state: &Progress| state.steps.iter().any(|step| step.has_changed_weights());
        if changed(&self.lock()) && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "an FP8 autocast guard was closed inside of another one whose step goes on although weights have changed since it \
                 began: no scale is updated. Was the outer guard forgotten (mem::forget, a leaked box)? One that stands around \
                 a loop needs end_step() after each optimizer step"
            );
        }
    }

    /// [`Session::begin`] for a step that has used no model.
    fn begin_unused(&self) -> Result<()> {
        match self.purpose {
            Purpose::Training => self.begin(),
            Purpose::Evaluation | Purpose::Calibration => Ok(()),
        }
    }

    /// Ends a step of a session that continues.
    pub(super) fn end_step(&self) -> (Vec<Arc<StateTable>>, Result<StepSummary>) {
        let began = self.begin_unused();
        // Before the layers are taken: one that is used after it may belong to the next step.
        self.reduces.store(false, Ordering::Relaxed);
        let ended = self.take(false);
        self.failed.store(false, Ordering::Relaxed);
        let done = self.with_static_casts(began.and(ended.commit()));
        self.count_step();
        (ended.tables(), done)
    }

    /// Begins the next step of a session that continues, once the tables of the last are known to the thread.
    pub(super) fn next_step(&self) {
        let mut state = self.lock();
        (state.job, state.began) = (state.job.next(), false);
    }

    /// Discards what was recorded.
    pub(super) fn abort(&self) {
        for step in self.take(true).steps {
            step.abort();
        }
        self.count_step();
    }

    /// One rank alone may evaluate.
    fn count_step(&self) {
        if self.purpose != Purpose::Evaluation {
            self.lock().job.count_step();
        }
    }

    fn take(&self, closes: bool) -> EndedStep {
        let mut state = self.lock();
        state.closed |= closes;
        let mut steps = std::mem::take(&mut state.steps);
        in_order(&mut steps, |step| step.table());
        EndedStep {
            steps,
            shared: state.job.has_group(),
            reducing: state.job.reducing(),
            used: std::mem::take(&mut state.used).into_values().collect(),
        }
    }
}

/// Whether the forward pass uses only calibrated scales, which training does not change.
fn is_static(config: &ResolvedConfig) -> bool {
    let forward = [&config.input, &config.weight];
    forward
        .iter()
        .all(|cast| cast.scaling == ScalingType::Static)
}

fn same_group(a: &Option<Arc<dyn ReductionGroup>>, b: &Option<Arc<dyn ReductionGroup>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => a.identity() == b.identity(),
        _ => false,
    }
}

/// Records how the layer's rows are to be updated: by the last configuration with a delayed cast of the row. Returns whether amaxes of a
/// row are reduced over several ranks.
fn note_rules(step: &StepCells, layer: &Fp8State, settings: &Settings) -> bool {
    let config = &*settings.config;
    let others = has_others(settings.group.as_ref());
    let mut over_ranks = false;
    for (role, slot) in layer.slots() {
        if !is_static(config) {
            step.note_trained(slot.row());
        }
        let Some((rule, reduces)) = delayed_rule(config, *role) else {
            continue;
        };
        over_ranks |= others && reduces;
        let rule = rule.with_group(settings.group.clone().filter(|_| reduces));
        step.note_rule(slot.row(), *role, rule);
    }
    over_ranks
}
