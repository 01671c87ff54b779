//! What happens to the recordings of a step when it ends.

use super::job::in_order;
use super::state::{Calibration, Fp8State, casts_of, delayed_rule};
use super::summary::StepSummary;
use crate::config::{ResolvedConfig, ScalingType};
use crate::error::Result;
use fp8_candle::state::{CalibrationRow, NonFiniteCounts, ReductionGroup, StepCells};
use fp8_candle::{Role, StateTable};
use std::sync::Arc;

/// A layer that has signed in, with the last configuration that it used.
#[derive(Debug)]
pub(super) struct UsedLayer {
    pub(super) state: Arc<Fp8State>,
    pub(super) config: Arc<ResolvedConfig>,
    pub(super) group: Option<Arc<dyn ReductionGroup>>,
    /// Whether a training guard has used it, so that its rules are recorded.
    pub(super) noted: bool,
    /// Whether it has trained with scales other than calibrated ones since the step began.
    pub(super) trained: bool,
}

/// The recordings and the used layers of a step that has ended.
pub(super) struct EndedStep {
    pub(super) steps: Vec<Arc<StepCells>>,
    /// Other ranks may have used tables that this one has not.
    pub(super) shared: bool,
    /// Tables that reduce over ranks, used or not.
    pub(super) reducing: Vec<Arc<StateTable>>,
    pub(super) used: Vec<UsedLayer>,
}

impl EndedStep {
    pub(super) fn tables(&self) -> Vec<Arc<StateTable>> {
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
            kept_bytes: 0,
        }
    }

    /// Updates the scales of inputs and weights; those of gradients are updated after their backward pass.
    pub(super) fn commit(&self) -> Result<StepSummary> {
        let mut summary = self.summary();
        let mut first: Result<()> = Ok(());
        let mut tables = self.tables();
        for table in &self.reducing {
            if !tables.iter().any(|known| Arc::ptr_eq(known, table)) {
                tables.push(table.clone());
            }
        }
        in_order(&mut tables, |table| table);
        for table in tables {
            let own = self.steps.iter().map(|step| &**step);
            let own: Vec<_> = own
                .filter(|step| Arc::ptr_eq(step.table(), &table) && step.mark().is_some())
                .collect();
            let done = table.commit_all(&own, self.shared);
            first = first.and(done.map_err(Into::into));
            if own.is_empty() {
                continue;
            }
            first = first.and(table.report().map(drop).map_err(Into::into));
            let Some(mark) = own.first().and_then(|step| step.mark().cloned()) else {
                continue;
            };
            match table.began() {
                Ok(began) => {
                    let counts = NonFiniteCounts::of_step(table, began, mark);
                    summary.counts.push(counts);
                }
                Err(error) => first = first.and(Err(error.into())),
            }
        }
        let aside = self.steps.iter().filter(|step| step.mark().is_none());
        first = first.and(summary.add_recorded(aside));
        for used in &self.used {
            if used.trained {
                used.state.set_calibration(None);
            }
        }
        first?;
        Ok(summary)
    }

    /// The summary of an evaluation, which changes nothing.
    pub(super) fn report(&self) -> Result<StepSummary> {
        let mut summary = self.summary();
        summary.add_recorded(self.steps.iter())?;
        Ok(summary)
    }

    /// Computes static scales from what was recorded. Finishes every layer; returns the first error.
    pub(super) fn calibrate(&self) -> Result<StepSummary> {
        let mut first: Result<()> = Ok(());
        for step in &self.steps {
            let here =
                || (self.used.iter()).filter(|used| Arc::ptr_eq(used.state.table(), step.table()));
            let rows: Vec<CalibrationRow> = here().flat_map(calibration_rows).collect();
            // Ranks of one job calibrate with one group.
            let group = here().find_map(|used| used.group.clone());
            let done = step
                .table()
                .finish_calibration(step, &rows, group.as_deref());
            let done = done.map(|errors| errors.into_iter().next());
            first = first.and(match done {
                Ok(None) => Ok(()),
                Ok(Some(error)) => Err(error.into()),
                Err(error) => Err(error.into()),
            });
        }
        for used in &self.used {
            let slots = used.state.slots();
            // An empty batch records nothing, so its layers stay uncalibrated.
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

/// The rows of a layer to calibrate. Amaxes of inputs are combined with those of earlier batches; those of a weight are not, as
/// each batch sees all of it. Delayed casts follow their rule and its history.
fn calibration_rows(used: &UsedLayer) -> Vec<CalibrationRow> {
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

/// Updates the gradient scales of a table if a step has ended since their last update.
pub(super) fn update_gradients(table: &Arc<StateTable>) -> Result<StepSummary> {
    table.update_gradients()?;
    let (before, now) = table.report()?;
    Ok(StepSummary {
        counts: vec![NonFiniteCounts::between(table.clone(), before, now)],
        ..StepSummary::default()
    })
}
