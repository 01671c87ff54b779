//! Ending a step: merging its amaxes into the table, and new scales for all rows at once.

use super::reduction::{Phase, Reduction};
use super::role::Role;
use super::step::{Notes, StepCells};
use super::table::{IdleRule, Initial, Inner, RowRule, StateTable, check_history_len, longer};
use crate::base::data::columns::{Recorded, RowUpdate};
use crate::base::error::Result;
use crate::device::backend;

impl StateTable {
    /// Commits a training step: merges what it recorded, adopts the rules of its casts, and updates the rows of inputs and
    /// weights. Gradients wait for [`StateTable::update_gradients`], since their backward pass may come later.
    ///
    /// # Errors
    /// If the reduction over ranks fails, does not return a vector that fits this table, or other ranks reduce something else. Nothing is
    /// lost then: the next update includes this one.
    pub fn commit(&self, step: &StepCells) -> Result<()> {
        self.commit_all(&[step], false)
    }

    /// [`StateTable::commit`] for the parts of one step: rows added in the middle of it have cells of their own. If other ranks may have
    /// used the table (`shared`), rows that reduce over ranks are also updated without parts, where another rank has used it.
    ///
    /// # Errors
    /// As [`StateTable::commit`].
    pub fn commit_all(&self, steps: &[&StepCells], shared: bool) -> Result<()> {
        let mut delayed = false;
        for step in steps {
            if step.merge_into_table()? {
                let notes = step.take_notes();
                delayed |= !notes.rules.is_empty();
                self.lock().adopt(notes, step);
            }
        }
        let used_elsewhere = shared && self.reduces();
        if !delayed && !used_elsewhere {
            return Ok(());
        }
        let _updating = self.updating();
        // Due also if the update fails: the next one includes it.
        self.lock().gradients_due |= delayed;
        if self.update(Phase::Forward, delayed)? {
            self.lock().gradients_due = true;
        }
        Ok(())
    }

    /// Updates the rows of gradients if a training step was committed since the last time, here or on another rank.
    ///
    /// # Errors
    /// As [`StateTable::commit`].
    pub fn update_gradients(&self) -> Result<()> {
        let _updating = self.updating();
        if !self.gradients_due() {
            return Ok(());
        }
        self.update(Phase::Gradients, true)?;
        self.lock().gradients_due = false;
        Ok(())
    }

    /// Updates the rows of a phase from the running amaxes, and resets those to 0, if this rank (`used`) or another has used the
    /// table. Returns whether one has.
    fn update(&self, phase: Phase, used: bool) -> Result<bool> {
        let roles = |role: Role| role.is_gradient() == (phase == Phase::Gradients);
        let (which, rules): (Vec<bool>, Vec<Option<RowRule>>) = {
            let inner = self.lock();
            let row = |row: &super::table::Row| {
                let taken = roles(row.role);
                (taken, row.rule.clone().filter(|_| taken))
            };
            inner.rows.iter().map(row).unzip()
        };
        let mut taken = Taken {
            table: self,
            recorded: Some(self.running().take(&which)?),
        };
        let Some(recorded) = &taken.recorded else {
            return Ok(false);
        };
        let reduction = Reduction {
            table: self,
            phase,
            used,
        };
        let (reduced, used) = reduction.over_groups(recorded, &rules)?;
        if used {
            self.apply(&rules, &reduced)?;
            taken.recorded = None;
        }
        Ok(used)
    }

    fn apply(&self, rules: &[Option<RowRule>], recorded: &Recorded) -> Result<()> {
        let mut inner = self.lock();
        let have = rules.len();
        let mut updates: Vec<Option<RowUpdate>> = (inner.rows.iter().zip(rules))
            .map(|(row, rule)| {
                let rule = rule.as_ref()?;
                Some(RowUpdate {
                    rule: rule.rule.clone(),
                    format: rule.format,
                    window: rule.window,
                    remake: row.format.is_some_and(|format| format != rule.format)
                        // An unchanged weight is not recorded again; other tensors are recorded by every cast.
                        || row.role == Role::Weight && !row.is_made_by(&rule.rule),
                })
            })
            .collect();
        // Rows may have been added in the meantime.
        updates.resize(inner.rows.len(), None);
        let recorded = recorded.padded(inner.rows.len() - have)?;
        let longest = updates.iter().flatten().map(|update| update.window).max();
        check_history_len(longest.unwrap_or(0))?;
        let mut columns = inner.columns.clone();
        columns.amax_history = longer(&columns.amax_history, longest.unwrap_or(0))?;
        let updated = backend(self.device())?.update_columns(&columns, &updates, &recorded)?;
        inner.columns = updated.columns;
        for (index, (row, update)) in inner.rows.iter_mut().zip(&updates).enumerate() {
            let Some(update) = update else { continue };
            row.window = update.window;
            let changed = updated.changed.as_ref().map(|changed| changed[index]);
            // If only the device knows, every row with a recorded amax, here or on another rank, counts as changed.
            let reduced = row.rule.as_ref().is_some_and(|rule| rule.group.is_some());
            let may_have = std::mem::take(&mut row.touched) || reduced || update.remake;
            if changed.unwrap_or(may_have) {
                row.generation += 1;
                row.format = Some(update.format);
                row.made_by = Some(update.rule.clone());
                // The scale is no longer the one from calibration.
                row.calibrated_amax = None;
            }
            row.initial = match (row.initial, changed) {
                (_, Some(true)) => Initial::No,
                (Initial::Yes, None) if may_have => Initial::Unknown,
                (initial, _) => initial,
            };
        }
        Ok(())
    }
}

/// Running amaxes that an update has taken. If the update does not complete, because the reduction fails or panics, they
/// go back for the next one.
struct Taken<'a> {
    table: &'a StateTable,
    recorded: Option<Recorded>,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        if let Some(recorded) = &self.recorded
            && let Err(error) = self.table.running().merge(recorded)
        {
            tracing::error!(%error, "amaxes of a failed update are lost");
        }
    }
}

impl Inner {
    /// Rules of a committed step.
    fn adopt(&mut self, notes: Notes, step: &StepCells) {
        let group = notes.rules.values().find_map(|rule| rule.group.clone());
        for (index, row) in self.rows.iter_mut().enumerate() {
            if let Some(rule) = notes.rules.get(&index) {
                row.rule = Some(rule.clone());
            } else if index < step.rows() {
                // Other ranks may have used it, and update it by the same rule.
                match (&row.idle, notes.defaults.get(&row.role)) {
                    (IdleRule::OfTheStep, Some(default)) => row.rule = Some(default.clone()),
                    (IdleRule::Own { rule, reduces }, _) => {
                        let group = group.clone().filter(|_| *reduces);
                        row.rule = Some(rule.clone().with_group(group));
                    }
                    (IdleRule::Never, _) => row.rule = None,
                    (IdleRule::OfTheStep, None) => {}
                }
            }
            if notes.trained.contains(&index) {
                row.calibrated_amax = None;
            }
        }
    }
}

impl Recorded {
    /// The same amaxes, with zeros for rows added since.
    fn padded(&self, more: usize) -> Result<Self> {
        if more == 0 {
            return Ok(self.clone());
        }
        Ok(Self {
            amax: self.amax.pad_with_zeros(0, 0, more)?,
            non_finite: self.non_finite.pad_with_zeros(0, 0, more)?,
        })
    }
}
