//! What the casts of the latest step saw. Inf and NaN that a saturating cast has made finite veto the optimizer's step.

use super::mark::{OpenStep, StepMark, Window};
use super::step::StepCells;
use super::table::StateTable;
use crate::base::error::Result;
use candle_core::Tensor;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// A clock for the events of all tables.
static CLOCK: AtomicU64 = AtomicU64::new(1);

impl StateTable {
    /// Begins a training step: what casts see from now on belongs to it.
    ///
    /// # Errors
    /// If the device fails.
    pub fn begin_step(&self) -> Result<()> {
        let counts = self.counts_with(&[])?;
        let mut window = self.lock_window();
        let before = std::mem::take(&mut window.mark);
        window
            .pending
            .retain(|(_, mark)| !mark.has_backward() && Arc::strong_count(mark) > 1);
        if !before.has_backward() && Arc::strong_count(&before) > 1 {
            let seen = match &window.began {
                Some(began) => counts.sub(&padded(began, counts.elem_count())?)?,
                None => counts.clone(),
            };
            // Until nobody holds its mark: a backward pass may come as long as its graph lives, after however many others.
            window.pending.push((seen, before.clone()));
        }
        // A GPU has not told the host what the step has seen.
        if self.device().is_cpu() && !before.bad.load(Ordering::Relaxed) {
            window.culprit = None;
        }
        // Never set before: only this function sets it, of the step that it ends.
        let _ = before.ended.set(counts.clone());
        window.began = Some(counts);
        Ok(())
    }

    /// How many casts of each row had seen Inf or NaN when the latest training step began, and now, U32 `[rows]` on the device; steps that are not
    /// committed yet count, and so do earlier forward passes whose backward pass came in this step.
    ///
    /// # Errors
    /// If the device fails.
    pub fn seen_in_step(&self) -> Result<(Tensor, Tensor)> {
        let (began, late, mut open) = {
            let window = self.lock_window();
            let pending = window.pending.iter();
            let late: Vec<Tensor> = pending
                .filter(|(_, mark)| mark.has_backward())
                .map(|(seen, _)| seen.clone())
                .collect();
            let open: Vec<_> = window.open.iter().filter_map(Weak::upgrade).collect();
            (window.began.clone(), late, open)
        };
        // Without the window's lock, which a step may take while it holds its own.
        open.retain(|step| step.is_open());
        let mut now = self.counts_with(&open)?;
        let rows = now.elem_count();
        for seen in late {
            now = (now + padded(&seen, rows)?)?;
        }
        let before = match began {
            Some(began) => padded(&began, rows)?,
            None => now.zeros_like()?,
        };
        Ok((before, now))
    }

    /// The counts when the latest training step began.
    ///
    /// # Errors
    /// If the device fails.
    pub fn began(&self) -> Result<Tensor> {
        let began = self.lock_window().began.clone();
        match began {
            Some(began) => Ok(began),
            None => Ok(self.non_finite_counts()?.zeros_like()?),
        }
    }

    /// The counts at the end of the step of `mark`: now, if no other has begun since.
    ///
    /// # Errors
    /// If the device fails.
    pub(super) fn counts_at_end_of(&self, mark: &StepMark) -> Result<Tensor> {
        match mark.ended.get() {
            Some(ended) => Ok(ended.clone()),
            None => self.non_finite_counts(),
        }
    }

    /// When a cast of each row first saw Inf or NaN, in the latest step in which one did; 0 for never. One clock for all tables.
    pub(super) fn times(&self) -> Vec<u64> {
        let mut times = self.lock_window().times.clone();
        times.resize(self.rows(), 0);
        times
    }

    /// The name of the first row in which Inf or NaN was seen since the last step without.
    pub(super) fn culprit(&self) -> Option<Arc<str>> {
        let row = self.lock_window().culprit.as_ref()?.0;
        self.names().get(row).cloned()
    }

    /// Notes the first row with Inf or NaN that a reader of the latest step's counts has found. On a GPU, which does not tell the host, the
    /// culprit is known from then on.
    pub(super) fn note_look(&self, first: Option<usize>) {
        let mut window = self.lock_window();
        let mark = Arc::downgrade(&window.mark);
        match first {
            Some(row) => {
                window.culprit.get_or_insert((row, mark));
            }
            None if !self.device().is_cpu() => window.culprit = None,
            None => {}
        }
    }

    /// Forgets the latest step: the counts are those of a checkpoint.
    pub(super) fn restart_window(&self, counts: Tensor) {
        *self.lock_window() = Window {
            began: Some(counts),
            ..Window::default()
        };
    }

    /// Notes in the latest step that a change of one of the model's parameters was announced, or the step was skipped.
    pub(crate) fn note_step(&self) {
        self.lock_window()
            .mark
            .stepped
            .store(true, Ordering::Relaxed);
    }

    pub(super) fn mark(&self) -> Arc<StepMark> {
        self.lock_window().mark.clone()
    }

    pub(super) fn note_open(&self, step: &Arc<StepCells>) {
        let mut window = self.lock_window();
        window.open.retain(|step| step.strong_count() > 0);
        let step: Weak<StepCells> = Arc::downgrade(step);
        window.open.push(step);
    }

    /// Notes the first Inf or NaN of a row in the step of `mark`. Without `seen` it is the first cast of the row, on a GPU,
    /// which does not tell what it has seen.
    pub(super) fn note_time(&self, row: usize, mark: &Arc<StepMark>, seen: bool) {
        let now = CLOCK.fetch_add(1, Ordering::Relaxed);
        let mut window = self.lock_window();
        if window.times.len() <= row {
            window.times.resize(row + 1, 0);
        }
        window.times[row] = now;
        if seen {
            mark.bad.store(true, Ordering::Relaxed);
            let mark = Arc::downgrade(mark);
            window.culprit.get_or_insert((row, mark));
        }
    }

    /// Forgets what an aborted step has seen.
    pub(super) fn forget_culprit_of(&self, mark: &Arc<StepMark>) {
        let mut window = self.lock_window();
        let mark = Arc::downgrade(mark);
        if (window.culprit.as_ref()).is_some_and(|(_, of)| of.ptr_eq(&mark)) {
            window.culprit = None;
        }
    }

    /// The counts of the table with those of steps that are still open.
    fn counts_with(&self, open: &[Arc<dyn OpenStep>]) -> Result<Tensor> {
        let mut counts = self.non_finite_counts()?;
        let rows = counts.elem_count();
        for step in open {
            counts = (counts + padded(&step.recorded()?.non_finite, rows)?)?;
        }
        Ok(counts)
    }
}

/// The counts with zeros for rows that were added since.
pub(super) fn padded(counts: &Tensor, rows: usize) -> Result<Tensor> {
    let have = counts.elem_count();
    Ok(match have < rows {
        true => counts.pad_with_zeros(0, 0, rows - have)?,
        false => counts.clone(),
    })
}
