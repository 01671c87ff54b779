//! One step: which layers were used between the opening and the closing of an outermost guard.

use super::settings::{Mode, Settings};
use super::state::{Calibration, Fp8State, casts_of, delayed_rule};
use super::summary::StepSummary;
use crate::config::{ResolvedConfig, ScalingType};
use crate::error::{GuardError, Result};
use fp8_candle::state::{CalibrationRow, NonFiniteCounts, ReductionGroup, StepCells};
use fp8_candle::{Role, StateTable};
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What the guards of a session do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Training,
    Evaluation,
    Calibration,
}

/// What an outermost guard and those inside of it share.
#[derive(Debug)]
pub(super) struct Session {
    kind: Kind,
    state: Mutex<State>,
    failed: AtomicBool,
    /// Something was cast, or a prepared layer used, in whatever step.
    used: AtomicBool,
    static_casts: AtomicU64,
    warned: AtomicBool,
    /// Layers that computed in high precision since nobody has prepared them.
    unprepared: Mutex<Vec<String>>,
}

/// How many layers are named that were not prepared.
const NAMED: usize = 3;

#[derive(Debug, Default)]
struct State {
    closed: bool,
    steps: Vec<Arc<StepCells>>,
    /// Layers that signed in since the last end of a step, by address, with their last configuration.
    used: HashMap<usize, Use>,
}

#[derive(Debug)]
struct Use {
    state: Arc<Fp8State>,
    config: Arc<ResolvedConfig>,
    group: Option<Arc<dyn ReductionGroup>>,
    /// A training guard has used it, so that its rules are known.
    noted: bool,
    /// Trained with other scales than calibrated ones, in this use or one before it.
    trained: bool,
}

impl Session {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            state: Mutex::default(),
            failed: AtomicBool::new(false),
            used: AtomicBool::new(false),
            unprepared: Mutex::default(),
            static_casts: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn kind(&self) -> Kind {
        self.kind
    }

    pub(super) fn is_open(&self) -> bool {
        !self.lock().closed
    }

    pub(super) fn note_failure(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether a layer has failed in a session that has something to forget.
    pub(super) fn has_failed(&self) -> bool {
        self.kind != Kind::Evaluation && self.failed.load(Ordering::Relaxed)
    }

    /// Notes that a layer without FP8 state computes in high precision.
    pub(super) fn note_unprepared(&self, path: Option<&str>) {
        if self.used.load(Ordering::Relaxed) {
            return;
        }
        let mut names = (self.unprepared.lock()).unwrap_or_else(PoisonError::into_inner);
        let name = path.unwrap_or("a layer without a path");
        if names.len() < NAMED && !names.iter().any(|known| known == name) {
            names.push(name.to_string());
        }
    }

    /// Says it if nothing was ever cast.
    fn check_used(&self) {
        if self.kind != Kind::Calibration && !self.used.load(Ordering::Relaxed) {
            let names = (self.unprepared.lock()).unwrap_or_else(PoisonError::into_inner);
            warn_of_nothing(&names);
        }
    }

    pub(super) fn count_static_cast(&self) {
        self.used.store(true, Ordering::Relaxed);
        self.static_casts.fetch_add(1, Ordering::Relaxed);
    }

    /// Notes a use; gives the cells of the layer's table.
    pub(super) fn sign_in(
        &self,
        layer: &Arc<Fp8State>,
        settings: &Settings,
    ) -> Result<Arc<StepCells>> {
        let table = layer.table();
        let first_use = {
            let state = self.lock();
            if state.closed {
                return Err(GuardError::Closed.into());
            }
            !(state.steps.iter()).any(|step| Arc::ptr_eq(step.table(), table))
        };
        if first_use && self.kind == Kind::Training {
            // The backward pass of the model's last step is over. Not under the lock: a reduction over ranks may run the
            // user's code.
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
                // What evaluation sees in the middle of a training step vetoes nothing.
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
                state.steps.push(step.clone());
                step
            }
        };
        self.used.store(true, Ordering::Relaxed);
        let key = Arc::as_ptr(layer) as usize;
        let again = state.used.get(&key).is_some_and(|before| {
            Arc::ptr_eq(&before.config, &settings.config)
                && same_group(&before.group, &settings.group)
                && (before.noted || !trains)
        });
        if !again {
            if trains {
                note_rules(&step, layer, settings);
            }
            let before = state.used.get(&key);
            let noted = trains || before.is_some_and(|before| before.noted);
            let before = before.is_some_and(|before| before.trained);
            let used = Use {
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

    /// Ends the session; gives its tables and what was cast. Every table is finished; the first error is given.
    pub(super) fn close(&self) -> (Vec<Arc<StateTable>>, Result<StepSummary>) {
        let ended = self.take(true);
        let tables = ended.tables();
        let static_casts = self.static_casts.swap(0, Ordering::Relaxed);
        let done = match self.kind {
            Kind::Training => ended.commit(),
            Kind::Evaluation => ended.report(),
            Kind::Calibration => ended.calibrate(),
        };
        let done = done.map(|mut summary| {
            summary.casts += static_casts;
            self.check_used();
            summary
        });
        (tables, done)
    }

    /// Says once, at the end of a guard inside, that weights change while the step goes on.
    pub(super) fn warn_of_training_on(&self) {
        let changed = |state: &State| state.steps.iter().any(|step| step.has_changed_weights());
        if changed(&self.lock()) && !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "an FP8 autocast guard was closed inside of another one whose step goes on although weights have changed since it                  began: no scale is updated. Was the outer guard forgotten (mem::forget, a leaked box)? One that stands around                  a loop needs end_step() after each optimizer step"
            );
        }
    }

    /// Ends a step of a session that goes on.
    pub(super) fn end_step(&self) -> (Vec<Arc<StateTable>>, Result<StepSummary>) {
        let ended = self.take(false);
        self.failed.store(false, Ordering::Relaxed);
        let static_casts = self.static_casts.swap(0, Ordering::Relaxed);
        let done = ended.commit().map(|mut summary| {
            summary.casts += static_casts;
            self.check_used();
            summary
        });
        (ended.tables(), done)
    }

    /// Forgets what was recorded.
    pub(super) fn abort(&self) {
        for step in self.take(true).steps {
            step.abort();
        }
    }

    fn take(&self, closes: bool) -> Ended {
        let mut state = self.lock();
        state.closed |= closes;
        let mut steps = std::mem::take(&mut state.steps);
        // Threads use models in any order; ranks must reduce them in one.
        steps.sort_by_cached_key(|step| step.table().names().into_iter().next());
        Ended {
            steps,
            used: std::mem::take(&mut state.used).into_values().collect(),
        }
    }
}

/// What a session leaves behind.
struct Ended {
    steps: Vec<Arc<StepCells>>,
    used: Vec<Use>,
}

impl Ended {
    fn tables(&self) -> Vec<Arc<StateTable>> {
        let mut tables: Vec<Arc<StateTable>> = vec![];
        for step in &self.steps {
            if !tables.iter().any(|table| Arc::ptr_eq(table, step.table())) {
                tables.push(step.table().clone());
            }
        }
        tables
    }

    fn summary(&self) -> StepSummary {
        StepSummary {
            casts: self.steps.iter().map(|step| step.casts()).sum(),
            layers: self.used.len(),
            counts: vec![],
        }
    }

    /// Updates inputs and weights; the gradients wait for their backward pass.
    fn commit(&self) -> Result<StepSummary> {
        let mut summary = self.summary();
        let mut first = Ok(());
        for table in self.tables() {
            let own = self.steps.iter().map(|step| &**step);
            let own: Vec<_> = own
                .filter(|step| Arc::ptr_eq(step.table(), &table) && step.mark().is_some())
                .collect();
            let done = table.commit_all(&own);
            first = first.and(done);
            table.report()?;
            if let Some(mark) = own.first().and_then(|step| step.mark().cloned()) {
                let began = table.began()?;
                summary
                    .counts
                    .push(NonFiniteCounts::of_step(table, began, mark));
            }
        }
        let aside = self.steps.iter().filter(|step| step.mark().is_none());
        summary.add_recorded(aside)?;
        for used in &self.used {
            if used.trained {
                used.state.set_calibration(None);
            }
        }
        first?;
        Ok(summary)
    }

    /// Evaluation changes nothing.
    fn report(&self) -> Result<StepSummary> {
        let mut summary = self.summary();
        summary.add_recorded(self.steps.iter())?;
        Ok(summary)
    }

    /// Makes static scales of what was recorded. Every layer is finished; the first error is given.
    fn calibrate(&self) -> Result<StepSummary> {
        let mut first: Result<()> = Ok(());
        for step in &self.steps {
            let here =
                || (self.used.iter()).filter(|used| Arc::ptr_eq(used.state.table(), step.table()));
            let rows: Vec<CalibrationRow> = here().flat_map(calibration_rows).collect();
            // Ranks of one job calibrate with one group.
            let group = here().find_map(|used| used.group.clone());
            let errors = step
                .table()
                .finish_calibration(step, &rows, group.as_deref())?;
            if let (Some(error), Ok(())) = (errors.into_iter().next(), &first) {
                first = Err(error.into());
            }
        }
        for used in &self.used {
            let slots = used.state.slots();
            // An empty batch records nothing.
            let complete = (slots.iter())
                .filter(|(role, _)| !role.is_gradient())
                .all(|(_, slot)| slot.is_calibrated());
            let calibration = Calibration {
                input: used.config.input,
                weight: used.config.weight,
                round_scales_to_power_of_two: used.config.round_scales_to_power_of_two,
                weight_fingerprint: used.state.calibrated_weight(),
            };
            used.state.set_calibration(complete.then_some(calibration));
        }
        first?;
        Ok(self.summary())
    }
}

/// Inputs take earlier batches into account; a weight is known whole. Delayed casts follow their rule, whose history knows both.
fn calibration_rows(used: &Use) -> Vec<CalibrationRow> {
    let rows = used.state.slots().iter().filter_map(|(role, slot)| {
        let is_input = match role {
            Role::Input => true,
            Role::Weight => false,
            _ => return None,
        };
        let cast = casts_of(&used.config, *role)[0];
        let rule = match cast.scaling {
            ScalingType::Delayed => delayed_rule(&used.config, *role).map(|(rule, _)| rule),
            _ => None,
        };
        Some(
            CalibrationRow::new(slot.row(), cast.format?)
                .with_earlier(is_input)
                .allow_zero(!is_input)
                .with_rule(rule),
        )
    });
    rows.collect()
}

/// Whether the forward pass uses calibrated scales only, which training leaves as they are.
fn is_static(config: &ResolvedConfig) -> bool {
    let forward = [&config.input, &config.weight];
    forward
        .iter()
        .all(|cast| cast.scaling == ScalingType::Static)
}

fn same_group(a: &Option<Arc<dyn ReductionGroup>>, b: &Option<Arc<dyn ReductionGroup>>) -> bool {
    match (a, b) {
        (None, None) => true,
        (Some(a), Some(b)) => Arc::ptr_eq(a, b),
        _ => false,
    }
}

/// How the layer's rows are to be updated: the last configuration with a delayed cast of a row counts.
fn note_rules(step: &StepCells, layer: &Fp8State, settings: &Settings) {
    let config = &*settings.config;
    for (role, slot) in layer.slots() {
        if !is_static(config) {
            step.note_trained(slot.row());
        }
        let Some((rule, reduces)) = delayed_rule(config, *role) else {
            continue;
        };
        let rule = rule.with_group(settings.group.clone().filter(|_| reduces));
        step.note_rule(slot.row(), *role, rule);
    }
}

/// Updates the gradient scales of a table, if a step has ended since they were last updated.
pub(super) fn update_gradients(table: &Arc<StateTable>) -> Result<StepSummary> {
    table.update_gradients()?;
    let (before, now) = table.report()?;
    Ok(StepSummary {
        counts: vec![NonFiniteCounts::between(table.clone(), before, now)],
        ..StepSummary::default()
    })
}

/// Says once in a process that a guard was enabled for nothing: in `tracing`, or on stderr where nobody listens to that.
fn warn_of_nothing(unprepared: &[String]) {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if WARNED.swap(true, Ordering::Relaxed) {
        return;
    }
    let why = match unprepared {
        [] => "no layer of this library ran in it: is the guard bound to a name (`let _guard = ..`, not `let _ = ..`), does the forward \
               pass run on the guard's thread (else take a handle), are the layers those of `nn` (those of candle_nn have no FP8)?"
            .to_string(),
        names => format!(
            "layers ran in high precision because they are not prepared (`{}`{}): call prepare_fp8, whose report says what became of each",
            names.join("`, `"),
            if names.len() == NAMED { ", .." } else { "" },
        ),
    };
    let text = format!("an enabled FP8 autocast guard was closed without any FP8; {why}");
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => eprintln!("warning: {text}"),
    }
}
