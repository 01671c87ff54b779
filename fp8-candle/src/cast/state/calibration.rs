//! Scales from the amaxes of calibration batches.

use super::group::ReductionGroup;
use super::reduction::{Phase, Reduction};
use super::step::StepCells;
use super::table::{Initial, Inner, RowRule, StateTable, check_history_len, longer};
use crate::base::data::columns::{Columns, Recorded, RowUpdate};
use crate::base::error::{Error, Result};
use crate::device::backend;
use candle_core::{DType, Tensor};
use fp8_core::{Format, ScaleError, reciprocal, static_dequant_scale};

/// How calibration sets one row.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CalibrationRow {
    /// The row.
    pub row: usize,
    /// The format that the scale is for.
    pub format: Format,
    /// Include the amaxes of earlier calibrations (for inputs; every calibration sees all of a weight).
    pub with_earlier: bool,
    /// Whether a tensor of zeros gets a scale. For inputs it should not: every real input would saturate under it.
    pub allow_zero: bool,
    /// For a delayed cast: the amax enters the history, from which the rule makes the scale, as at the end of a training step.
    pub rule: Option<RowRule>,
}

impl CalibrationRow {
    /// The scale `amax / MAX` for `format`, from this calibration alone; an amax of 0 is an error.
    pub fn new(row: usize, format: Format) -> Self {
        Self {
            row,
            format,
            with_earlier: false,
            allow_zero: false,
            rule: None,
        }
    }

    /// The same row with another [`CalibrationRow::rule`].
    pub fn with_rule(self, rule: impl Into<Option<RowRule>>) -> Self {
        Self {
            rule: rule.into(),
            ..self
        }
    }

    /// The same row with or without [`CalibrationRow::with_earlier`].
    pub fn with_earlier(self, with_earlier: bool) -> Self {
        Self {
            with_earlier,
            ..self
        }
    }

    /// The same row with or without [`CalibrationRow::allow_zero`].
    pub fn allow_zero(self, allow_zero: bool) -> Self {
        Self { allow_zero, ..self }
    }
}

impl StateTable {
    /// Sets scales from what `step` has recorded, reduced over the ranks of `group`: `dequant_scale = amax / MAX`, or by the rule
    /// of a delayed cast.
    /// A row in which nothing was recorded stays as it is. Returns an error for each row that cannot be calibrated; its
    /// state stays as well.
    ///
    /// # Errors
    /// If the reduction fails, or other ranks reduce something else; nothing is changed then.
    pub fn finish_calibration(
        &self,
        step: &StepCells,
        rows: &[CalibrationRow],
        group: Option<&dyn ReductionGroup>,
    ) -> Result<Vec<Error>> {
        step.abort_after(|recorded| {
            // An amax that is not finite on one rank must be so on all.
            let mut amaxes = recorded.amax.to_vec1::<f32>()?;
            for (amax, count) in amaxes.iter_mut().zip(recorded.non_finite.to_vec1::<u32>()?) {
                *amax = if count > 0 { f32::INFINITY } else { *amax };
            }
            if let Some(group) = group {
                let len = amaxes.len();
                let mine = Tensor::from_vec(amaxes, len, self.device())?;
                let reduction = Reduction {
                    table: self,
                    phase: Phase::Calibration,
                    used: true,
                };
                amaxes = reduction.run(group, &mine)?.0.to_vec1()?;
            }
            self.calibrate(step, rows, &amaxes)
        })
    }

    fn calibrate(
        &self,
        step: &StepCells,
        rows: &[CalibrationRow],
        amaxes: &[f32],
    ) -> Result<Vec<Error>> {
        let mut inner = self.lock();
        let mut errors = vec![];
        let mut made: Vec<(&CalibrationRow, f32)> = vec![];
        for wanted in rows {
            let index = wanted.row;
            // Rows added after the step began have no cell in it.
            let (Some(&amax), Some(row)) = (amaxes.get(index), inner.rows.get(index)) else {
                continue;
            };
            if !step.is_touched(index) && amax == 0. {
                continue;
            }
            if !amax.is_finite() {
                errors.push(Error::Calibration {
                    slot: row.name.to_string(),
                    source: ScaleError::NonFinite { amax },
                });
                continue;
            }
            if amax == 0. && !wanted.allow_zero {
                errors.push(Error::ZeroCalibration(row.name.to_string()));
                continue;
            }
            made.push((wanted, amax));
        }
        inner.enter_histories(&made, self)?;
        let mut quant_scale = inner.columns.quant_scale.to_vec1::<f32>()?;
        let mut dequant_scale = inner.columns.dequant_scale.to_vec1::<f32>()?;
        for (wanted, amax) in made {
            let index = wanted.row;
            let (scale, amax) = match &wanted.rule {
                Some(rule) => {
                    let history = inner.columns.amax_history.get(index)?.to_vec1::<f32>()?;
                    let window = &history[..rule.window.min(history.len())];
                    let reduced = rule.rule.amax_compute.reduce(window);
                    // The history of a tensor of zeros may be empty.
                    let reduced = if reduced.is_finite() {
                        reduced.max(0.)
                    } else {
                        amax
                    };
                    (reciprocal(quant_scale[index]), reduced)
                }
                None => {
                    let earlier = inner.rows[index]
                        .calibrated_amax
                        .filter(|_| wanted.with_earlier);
                    let amax = amax.max(earlier.unwrap_or(0.));
                    match static_dequant_scale(amax, wanted.format) {
                        Ok(scale) => (scale, amax),
                        Err(source) => {
                            let slot = inner.rows[index].name.to_string();
                            errors.push(Error::Calibration { slot, source });
                            continue;
                        }
                    }
                }
            };
            let row = &mut inner.rows[index];
            // The quant_scale that a file with only the dequant_scale would give.
            dequant_scale[index] = scale;
            quant_scale[index] = reciprocal(scale).min(f32::MAX);
            row.calibrated_amax = Some(amax);
            row.format = Some(wanted.format);
            row.initial = Initial::No;
            row.epoch += 1;
        }
        let column = |values: Vec<f32>| Tensor::from_slice(&values, values.len(), self.device());
        inner.columns.quant_scale = column(quant_scale)?;
        inner.columns.dequant_scale = column(dequant_scale)?;
        Ok(errors)
    }
}

impl Inner {
    /// Updates the rows that have a rule, as the end of a training step does.
    fn enter_histories(
        &mut self,
        made: &[(&CalibrationRow, f32)],
        table: &StateTable,
    ) -> Result<()> {
        let count = self.rows.len();
        let mut updates: Vec<Option<RowUpdate>> = vec![None; count];
        let mut amaxes = vec![0f32; count];
        for (wanted, amax) in made {
            let Some(rule) = &wanted.rule else { continue };
            let row = &mut self.rows[wanted.row];
            updates[wanted.row] = Some(RowUpdate {
                rule: rule.rule.clone(),
                format: wanted.format,
                window: rule.window,
                remake: row.format.is_some_and(|format| format != wanted.format),
            });
            amaxes[wanted.row] = *amax;
        }
        let Some(longest) = updates.iter().flatten().map(|update| update.window).max() else {
            return Ok(());
        };
        check_history_len(longest)?;
        let device = table.device();
        let columns = Columns {
            amax_history: longer(&self.columns.amax_history, longest)?,
            ..self.columns.clone()
        };
        let recorded = Recorded {
            amax: Tensor::from_vec(amaxes, count, device)?,
            non_finite: Tensor::zeros(count, DType::U32, device)?,
        };
        self.columns = backend(device)?
            .update_columns(&columns, &updates, &recorded)?
            .columns;
        for (row, update) in self.rows.iter_mut().zip(&updates) {
            row.window = update.as_ref().map_or(row.window, |update| update.window);
        }
        Ok(())
    }
}

impl StepCells {
    /// Ends the step without merging it into the running amaxes, and passes what it recorded to `f`.
    fn abort_after<R>(
        &self,
        f: impl FnOnce(&crate::base::data::columns::Recorded) -> Result<R>,
    ) -> Result<R> {
        let recorded = self.recorded();
        self.abort();
        f(&recorded?)
    }
}
