//! What one step records, separate from the table until the step is committed.

use super::mark::{OpenStep, StepMark};
use super::role::Role;
use super::table::{IdleRule, RowRule, StateTable};
use crate::base::data::columns::Recorded;
use crate::base::error::Result;
use crate::base::sync::{lock, read, write};
use crate::device::cpu::elements::with_slices;
use crate::device::{AmaxCells, backend};
use candle_core::Tensor;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};

/// Where the casts of one step record: cells for every row of a table.
///
/// A commit merges them into the table; backward passes after it record into the table itself. An abort drops what was
/// recorded and everything that is recorded later.
#[derive(Debug)]
pub struct StepCells {
    table: Arc<StateTable>,
    cells: Box<dyn AmaxCells>,
    /// Rows in which something was recorded, even an amax of 0.
    touched: Vec<AtomicBool>,
    /// The step of the table that these cells belong to; None in evaluation and calibration, which veto nothing.
    mark: Option<Arc<StepMark>>,
    /// Rows whose place in time order is known.
    timed: Vec<AtomicBool>,
    status: RwLock<Status>,
    notes: Mutex<Notes>,
    casts: AtomicU64,
    changed_weights: AtomicBool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    Open,
    Committed,
    Aborted,
}

/// How the commit updates the rows.
#[derive(Debug, Default)]
pub(super) struct Notes {
    pub(super) rules: HashMap<usize, RowRule>,
    /// For rows that the step has not used, but other ranks may have.
    pub(super) defaults: HashMap<Role, RowRule>,
    /// Rows that were trained with scales that are not calibrated.
    pub(super) trained: Vec<usize>,
}

impl OpenStep for StepCells {
    fn is_open(&self) -> bool {
        *read(&self.status) == Status::Open
    }

    fn recorded(&self) -> Result<Recorded> {
        self.cells.read()
    }
}

impl StepCells {
    /// Empty cells for a step of `table`.
    pub fn new(table: &Arc<StateTable>) -> Result<Arc<Self>> {
        Self::of(table, None)
    }

    /// Empty cells for the training step that [`StateTable::begin_step`] has begun: Inf and NaN that its casts see veto the
    /// optimizer's step.
    pub fn training(table: &Arc<StateTable>) -> Result<Arc<Self>> {
        let step = Self::of(table, Some(table.mark()))?;
        table.note_open(&step);
        Ok(step)
    }

    fn of(table: &Arc<StateTable>, mark: Option<Arc<StepMark>>) -> Result<Arc<Self>> {
        let rows = table.rows();
        let none = || (0..rows).map(|_| AtomicBool::new(false)).collect();
        Ok(Arc::new(Self {
            table: table.clone(),
            cells: backend(table.device())?.amax_cells(table.device(), rows)?,
            touched: none(),
            timed: none(),
            mark,
            status: RwLock::new(Status::Open),
            notes: Mutex::default(),
            casts: AtomicU64::new(0),
            changed_weights: AtomicBool::new(false),
        }))
    }

    /// The table of the rows.
    pub fn table(&self) -> &Arc<StateTable> {
        &self.table
    }

    /// Number of rows of the table when the step began.
    pub fn rows(&self) -> usize {
        self.touched.len()
    }

    /// The training step that these cells belong to, if they belong to one.
    pub fn mark(&self) -> Option<&Arc<StepMark>> {
        self.mark.as_ref()
    }

    /// Notes that a backward pass has reached a layer of this step.
    pub(crate) fn note_backward(&self) {
        if let Some(mark) = &self.mark {
            mark.note_backward();
        }
    }

    /// Notes a row's place in the order in which casts saw Inf and NaN. A GPU does not tell the host what a cast has seen: there it is
    /// the order of the first casts.
    fn note_time(&self, row: usize, amax: &Tensor) -> Result<()> {
        let (Some(mark), Some(timed)) = (&self.mark, self.timed.get(row)) else {
            return Ok(());
        };
        if timed.load(Ordering::Relaxed) {
            return Ok(());
        }
        let on_host = amax.device().is_cpu();
        if (!on_host || is_non_finite(amax)?) && !timed.swap(true, Ordering::Relaxed) {
            self.table.note_time(row, mark, on_host);
        }
        Ok(())
    }

    /// Notes that a row is cast with delayed scales in this step. The last rule applies.
    pub fn note_rule(&self, row: usize, role: Role, rule: RowRule) {
        let lends = {
            let table = self.table.lock();
            let row = table.rows.get(row);
            row.is_none_or(|row| matches!(row.idle, IdleRule::OfTheStep))
        };
        let mut notes = lock(&self.notes);
        if lends {
            notes.defaults.insert(role, rule.clone());
        }
        notes.rules.insert(row, rule);
    }

    /// Notes that a row is trained with scales that are not calibrated: the calibrated one no longer describes it.
    pub fn note_trained(&self, row: usize) {
        let mut notes = lock(&self.notes);
        if !notes.trained.contains(&row) {
            notes.trained.push(row);
        }
    }

    pub(super) fn take_notes(&self) -> Notes {
        std::mem::take(&mut lock(&self.notes))
    }

    /// Records an amax (f32, any shape) of `row`. With `keep` it is used for scales, otherwise only Inf and NaN are counted.
    pub fn record(&self, row: usize, amax: &Tensor, keep: bool) -> Result<()> {
        // Held while recording: a commit in between would lose the amax.
        let status = read(&self.status);
        if *status != Status::Aborted {
            self.note_time(row, amax)?;
        }
        match *status {
            Status::Open => {
                if let Some(touched) = self.touched.get(row).filter(|_| keep) {
                    touched.store(true, Ordering::Relaxed);
                }
                self.cells.record(row, amax, keep)
            }
            Status::Committed => {
                if let Some(row) = self.table.lock().rows.get_mut(row).filter(|_| keep) {
                    row.touched = true;
                }
                self.table.running().record(row, amax, keep)
            }
            Status::Aborted => Ok(()),
        }
    }

    /// Counts a cast.
    pub fn count_cast(&self) {
        self.casts.fetch_add(1, Ordering::Relaxed);
    }

    /// How many tensors were cast in this step so far.
    pub fn casts(&self) -> u64 {
        self.casts.load(Ordering::Relaxed)
    }

    /// Whether, since this training step began, a change of the model's parameters was announced or noticed, or a loss scaler has skipped
    /// the step.
    pub fn has_ended(&self) -> bool {
        (self.mark.as_ref()).is_some_and(|mark| mark.stepped.load(Ordering::Relaxed))
    }

    /// How often readers have judged what the training step has seen.
    pub(crate) fn looks(&self) -> u64 {
        self.mark.as_ref().map_or(0, |mark| mark.looks())
    }

    /// Notes that a weight that was trained with in this step has changed.
    pub(crate) fn note_step(&self) {
        if let Some(mark) = &self.mark {
            mark.stepped.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn note_changed_weight(&self) {
        self.changed_weights.store(true, Ordering::Relaxed);
    }

    /// Whether a weight was trained with in this step, changed, and was trained with again.
    pub fn has_changed_weights(&self) -> bool {
        self.changed_weights.load(Ordering::Relaxed)
    }

    /// Whether the step was aborted, so that what it recorded is dropped.
    pub(crate) fn is_aborted(&self) -> bool {
        *read(&self.status) == Status::Aborted
    }

    /// Whether an amax of `row` was recorded in this step.
    pub(super) fn is_touched(&self, row: usize) -> bool {
        (self.touched.get(row)).is_some_and(|touched| touched.load(Ordering::Relaxed))
    }

    /// What this step has recorded so far.
    pub fn recorded(&self) -> Result<Recorded> {
        self.cells.read()
    }

    /// Drops the step.
    pub fn abort(&self) {
        let mut status = write(&self.status);
        if *status == Status::Open {
            *status = Status::Aborted;
            if let Some(mark) = &self.mark {
                self.table.forget_culprit_of(mark);
            }
        }
    }

    /// Merges the cells into the table. Returns whether the step was still open.
    pub(super) fn merge_into_table(&self) -> Result<bool> {
        let mut status = write(&self.status);
        if *status != Status::Open {
            return Ok(false);
        }
        self.table.running().merge(&self.cells.read()?)?;
        for (row, touched) in self.table.lock().rows.iter_mut().zip(&self.touched) {
            row.touched |= touched.load(Ordering::Relaxed);
        }
        *status = Status::Committed;
        Ok(true)
    }
}

/// Whether an amax on the CPU, of one scale or many, holds Inf or NaN.
pub(crate) fn is_non_finite(amax: &Tensor) -> Result<bool> {
    with_slices([amax], |[amaxes]: [&[f32]; 1]| {
        // Over all of them: a maximum of integers vectorizes, a loop that may end early does not.
        let largest = amaxes.iter().map(|amax| amax.abs().to_bits()).max();
        largest.is_some_and(|bits| bits >= f32::INFINITY.to_bits())
    })
}

/// Records the amaxes of casts of one row in one step.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct AmaxRecorder {
    /// The step that the cast belongs to. A backward pass may come after its end.
    pub step: Arc<StepCells>,
    /// The row of the cast tensor.
    pub row: usize,
    /// Whether to record amaxes for delayed scales: yes in training, no in evaluation.
    pub record: bool,
    /// Whether the tensor's amax belongs to the row; false where the row only counts stochastic roundings.
    pub watches_amax: bool,
}

impl AmaxRecorder {
    /// Records casts of `row` in `step`; for `record` see [`AmaxRecorder::record`].
    pub fn new(step: Arc<StepCells>, row: usize, record: bool) -> Self {
        Self {
            step,
            row,
            record,
            watches_amax: true,
        }
    }

    /// The same with or without [`AmaxRecorder::watches_amax`]; without, casts are only counted.
    pub fn with_watched_amax(self, watches_amax: bool) -> Self {
        Self {
            record: self.record && watches_amax,
            watches_amax,
            ..self
        }
    }

    /// Notes a cast that measured `amax`. `makes_scales`: delayed scales are made from it.
    pub(crate) fn note(&self, amax: Option<&Tensor>, makes_scales: bool) -> Result<()> {
        self.step.count_cast();
        match amax.filter(|_| self.watches_amax) {
            Some(amax) => self
                .step
                .record(self.row, amax, self.record && makes_scales),
            None => Ok(()),
        }
    }
}
