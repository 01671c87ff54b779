//! What a step has cast.

use crate::error::Result;
use candle_core::Tensor;
use fp8_candle::StateTable;
use fp8_candle::state::{StepCells, StepMark};
use std::sync::Arc;

/// What was cast between the ends of two steps.
///
/// Counts of Inf and NaN stay on their device until [`StepSummary::non_finite`] asks for them.
#[derive(Debug, Clone, Default)]
pub struct StepSummary {
    pub(super) casts: u64,
    pub(super) layers: usize,
    pub(super) counts: Vec<Counts>,
}

/// How many casts of each row of a table saw Inf or NaN, before and after.
#[derive(Debug, Clone)]
pub(crate) struct Counts {
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

impl Counts {
    pub(crate) fn between(table: Arc<StateTable>, before: Tensor, after: Tensor) -> Self {
        let after = After::Known(after);
        Self {
            table,
            before,
            after,
        }
    }

    /// Of a whole step, the backward pass that may come after its guard included.
    pub(super) fn of_step(table: Arc<StateTable>, before: Tensor, mark: Arc<StepMark>) -> Self {
        let after = After::EndOf(mark);
        Self {
            table,
            before,
            after,
        }
    }

    pub(crate) fn table(&self) -> &Arc<StateTable> {
        &self.table
    }

    pub(crate) fn before(&self) -> &Tensor {
        &self.before
    }

    pub(crate) fn after(&self) -> Result<Tensor> {
        Ok(match &self.after {
            After::Known(after) => after.clone(),
            After::EndOf(mark) => self.table.counts_at_end_of(mark)?,
        })
    }
}

/// A tensor role in which casts saw Inf or NaN.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NonFinite {
    /// Path of the layer, a dot, the role: `blocks.0.fc.input`.
    pub slot: String,
    /// In how many casts.
    pub casts: u32,
}

/// Where casts saw Inf or NaN, the first one in time first. Copies counts to the host.
pub(crate) fn non_finite(counts: &[Counts]) -> Result<Vec<NonFinite>> {
    let mut found: Vec<(u64, NonFinite)> = vec![];
    for counts in counts {
        let table = &counts.table;
        let before = counts.before.to_vec1::<u32>()?;
        let now = counts.after()?.to_vec1::<u32>()?;
        // Rows may have come meanwhile.
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

impl StepSummary {
    /// Takes in what came later.
    pub(super) fn merge(&mut self, later: Self) {
        self.casts += later.casts;
        self.layers += later.layers;
        self.counts.extend(later.counts);
    }

    /// Takes in what these cells have recorded, which becomes part of no table.
    pub(super) fn add_recorded<'a>(
        &mut self,
        steps: impl Iterator<Item = &'a Arc<StepCells>>,
    ) -> Result<()> {
        for step in steps {
            let counts = step.recorded()?.non_finite;
            let none = Tensor::zeros_like(&counts)?;
            let table = step.table().clone();
            self.counts.push(Counts::between(table, none, counts));
        }
        Ok(())
    }

    /// How many tensors were cast to FP8 in the forward passes of the step, and in those backward passes that ran before its
    /// end.
    pub fn casts(&self) -> u64 {
        self.casts
    }

    /// How many prepared layers were used.
    pub fn layers(&self) -> usize {
        self.layers
    }

    /// Where casts of the step saw Inf or NaN, under whatever recipe, the first one in time first. Gradients are among them as soon as the
    /// backward pass has run, which may be after the guard has closed: ask then, or [`end_step`](crate::end_step). On a GPU the order is
    /// that in which the tensors were first cast. Copies counts to the host.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Module, Tensor, Var};
    /// # use fp8_recipes::{fp8_autocast, nn, prepare_fp8};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let weight = Var::randn(0f32, 1., (16, 32), &Device::Cpu)?;
    /// # let layer = nn::Linear::new(weight.as_tensor().clone(), None).with_path("fc");
    /// # prepare_fp8(&layer, &Default::default())?;
    /// # let x = Tensor::ones((4, 32), DType::F32, &Device::Cpu)?;
    /// let guard = fp8_autocast("delayed")?;
    /// let y = layer.forward(&x)?;
    /// let summary = guard.close()?;
    /// assert!(summary.non_finite()?.is_empty());
    /// (y.sum_all()? * f64::INFINITY)?.backward()?;
    /// assert_eq!(summary.non_finite()?[0].slot, "fc.grad_output");
    /// # Ok(()) }
    /// ```
    pub fn non_finite(&self) -> Result<Vec<NonFinite>> {
        non_finite(&self.counts)
    }

    /// The tensor in which Inf or NaN was first seen since the last step without: where the trouble came from, also if this step shows
    /// consequences alone. None if this step has seen none. Copies counts to the host.
    ///
    /// # Errors
    /// As [`StepSummary::non_finite`].
    pub fn first_non_finite(&self) -> Result<Option<String>> {
        let found = self.non_finite()?;
        Ok(culprit(&self.counts, &found))
    }
}

/// What the tables remember, else the first one found.
pub(crate) fn culprit(counts: &[Counts], found: &[NonFinite]) -> Option<String> {
    let first = found.first()?;
    // The table of the first one found.
    let mut tables = counts.iter().map(Counts::table);
    let table = tables.find(|table| table.names().iter().any(|name| **name == *first.slot))?;
    let remembered = table.culprit().map(|name| name.to_string());
    Some(remembered.unwrap_or_else(|| first.slot.clone()))
}
