//! In which tensors the casts of a step saw Inf or NaN.

use super::mark::StepMark;
use super::table::StateTable;
use super::window::padded;
use crate::base::error::Result;
use crate::device::is_recorded;
use candle_core::{DType, Tensor};
use std::sync::{Arc, Weak};

/// A tensor role in which casts saw Inf or NaN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonFinite {
    /// Path of the layer, a dot, the role: `blocks.0.fc.input`.
    pub slot: String,
    /// How many casts saw it.
    pub casts: u32,
}

/// How many casts of each row of a table had seen Inf or NaN at the beginning and at the end of a step.
#[derive(Debug, Clone)]
pub struct NonFiniteCounts {
    table: Arc<StateTable>,
    before: Tensor,
    after: After,
}

#[derive(Debug, Clone)]
enum After {
    Known(Tensor),
    /// A backward pass may still come.
    EndOf(Arc<StepMark>),
}

/// What a reader has known of a table's counts at some moment of a training step.
#[derive(Debug, Clone)]
pub struct Judged {
    table: Weak<StateTable>,
    step: Weak<StepMark>,
    counts: Tensor,
}

impl Judged {
    /// Whether its table still exists.
    pub fn is_current(&self) -> bool {
        self.table.strong_count() > 0
    }
}

impl NonFiniteCounts {
    /// What casts of the latest training step of `table` have seen that a reader who has `judged` the counts before does not know yet, and
    /// what it knows then. So Inf and NaN of one step count once for each reader, however many steps without this model follow.
    ///
    /// While the table's device is recorded (`RecordedStep`), all of the step counts and there is nothing to know:
    /// tensors from before may not be read in the graph, and its own may not be kept. The reader keeps what it has.
    ///
    /// # Errors
    /// If the device fails.
    pub fn since(table: Arc<StateTable>, judged: &[Judged]) -> Result<(Self, Option<Judged>)> {
        let (own, mark) = (Arc::downgrade(&table), table.mark());
        let step = Arc::downgrade(&mark);
        let (began, now) = table.seen_in_step()?;
        if is_recorded(table.device()) {
            return Ok((Self::between(table, began, now), None));
        }
        mark.note_look();
        let mut all = judged.iter();
        let known = all.find(|known| known.table.ptr_eq(&own) && known.step.ptr_eq(&step));
        let before = match known {
            Some(known) => padded(&known.counts, now.elem_count())?,
            None => began,
        };
        let known = Judged {
            table: own,
            step,
            counts: now.clone(),
        };
        Ok((Self::between(table, before, now), Some(known)))
    }

    /// The counts of `table`, U32 `[rows]`, at two moments.
    pub fn between(table: Arc<StateTable>, before: Tensor, after: Tensor) -> Self {
        let after = After::Known(after);
        Self {
            table,
            before,
            after,
        }
    }

    /// The counts of the whole step of `mark`, including a backward pass that runs after its guard has closed.
    pub fn of_step(table: Arc<StateTable>, before: Tensor, mark: Arc<StepMark>) -> Self {
        let after = After::EndOf(mark);
        Self {
            table,
            before,
            after,
        }
    }

    /// The table that counts.
    pub fn table(&self) -> &Arc<StateTable> {
        &self.table
    }

    fn after(&self) -> Result<Tensor> {
        match &self.after {
            After::Known(after) => Ok(after.clone()),
            After::EndOf(mark) => self.table.counts_at_end_of(mark),
        }
    }

    /// An f64 scalar on the table's device: 0, or NaN if a cast of the step has seen Inf or NaN. Waits for no device.
    ///
    /// # Errors
    /// If the device fails.
    pub fn veto(&self) -> Result<Tensor> {
        let more = self.after()?.to_dtype(DType::F64)?;
        let more = (more - self.before.to_dtype(DType::F64)?)?
            .relu()?
            .sum_all()?;
        // The root of a negative number is NaN; the root of -0 is -0, which changes no sum.
        Ok(more.neg()?.sqrt()?)
    }

    /// Where casts saw Inf or NaN, in the order in which they first did. Copies counts to the host.
    ///
    /// # Errors
    /// If a device fails.
    pub fn list(all: &[Self]) -> Result<Vec<NonFinite>> {
        let mut found: Vec<(u64, NonFinite)> = vec![];
        for counts in all {
            let table = &counts.table;
            let before = counts.before.to_vec1::<u32>()?;
            let now = counts.after()?.to_vec1::<u32>()?;
            // Rows may have been added meanwhile.
            let before = before.into_iter().chain(std::iter::repeat(0));
            let times = table.times();
            let rows = table.names().into_iter().zip(now).zip(before).enumerate();
            let bad = rows.filter(|(_, ((_, now), before))| now > before);
            let bad: Vec<_> = bad
                .map(|(row, ((name, now), before))| (times[row], row, name, now - before))
                .collect();
            table.note_look(bad.iter().min().map(|(_, row, ..)| *row));
            for (time, _, name, casts) in bad {
                match found.iter_mut().find(|(_, other)| other.slot == *name) {
                    Some((_, other)) => other.casts += casts,
                    None => {
                        let slot = name.to_string();
                        found.push((time, NonFinite { slot, casts }));
                    }
                }
            }
        }
        found.sort_by_key(|(time, _)| *time);
        Ok(found.into_iter().map(|(_, found)| found).collect())
    }

    /// The tensor in which Inf or NaN was first seen since the last step without: the one that the table remembers, or else the first
    /// of [`NonFiniteCounts::list`]. None if the step has seen none. Copies counts to the host.
    ///
    /// # Errors
    /// If a device fails.
    pub fn first(all: &[Self]) -> Result<Option<String>> {
        let found = Self::list(all)?;
        let Some(first) = found.first() else {
            return Ok(None);
        };
        let mut tables = all.iter().map(Self::table);
        let table = tables.find(|table| table.names().iter().any(|name| **name == *first.slot));
        Ok(table.map(|table| {
            let remembered = table.culprit().map(|name| name.to_string());
            remembered.unwrap_or_else(|| first.slot.clone())
        }))
    }
}
