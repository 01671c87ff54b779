//! Static scales from the amaxes of calibration batches.

use super::group::ReductionGroup;
use super::step::StepCells;
use super::table::{Initial, StateTable};
use super::update::all_reduce_max;
use crate::error::{Error, Result};
use candle_core::Tensor;
use fp8_core::{Format, ScaleError, reciprocal, static_dequant_scale};

/// How calibration sets one row.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct CalibrationRow {
    /// The row.
    pub row: usize,
    /// The format that the scale is for.
    pub format: Format,
    /// Include the amaxes of earlier calibrations (for inputs; a weight is seen whole every time).
    pub with_earlier: bool,
    /// Whether a tensor of zeros gets a scale. For inputs it should not: every real input would saturate under it.
    pub allow_zero: bool,
}

impl CalibrationRow {
    /// A static scale for `format`, from this calibration alone; an amax of 0 is an error.
    pub fn new(row: usize, format: Format) -> Self {
        Self {
            row,
            format,
            with_earlier: false,
            allow_zero: false,
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
    /// Sets static scales, `dequant_scale = amax / MAX`, from what `step` has recorded, reduced over the ranks of `group`.
    /// A row in which nothing was recorded stays as it is. Returns an error for each row that cannot be calibrated; its
    /// state stays as well.
    ///
    /// # Errors
    /// If the reduction fails; nothing is changed then.
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
                amaxes = all_reduce_max(group, &mine)?.to_vec1()?;
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
        let mut quant_scale = inner.columns.quant_scale.to_vec1::<f32>()?;
        let mut dequant_scale = inner.columns.dequant_scale.to_vec1::<f32>()?;
        let mut errors = vec![];
        for wanted in rows {
            let index = wanted.row;
            // Rows added after the step began have no cell in it.
            let (Some(&amax), Some(row)) = (amaxes.get(index), inner.rows.get_mut(index)) else {
                continue;
            };
            if !step.is_touched(index) && amax == 0. {
                continue;
            }
            let refused = |source| Error::Calibration {
                slot: row.name.to_string(),
                source,
            };
            if !amax.is_finite() {
                errors.push(refused(ScaleError::NonFinite { amax }));
                continue;
            }
            if amax == 0. && !wanted.allow_zero {
                errors.push(Error::ZeroCalibration(row.name.to_string()));
                continue;
            }
            let earlier = row.calibrated_amax.filter(|_| wanted.with_earlier);
            let amax = amax.max(earlier.unwrap_or(0.));
            match static_dequant_scale(amax, wanted.format) {
                Err(source) => errors.push(refused(source)),
                Ok(scale) => {
                    dequant_scale[index] = scale;
                    quant_scale[index] = reciprocal(scale);
                    row.calibrated_amax = Some(amax);
                    row.format = Some(wanted.format);
                    row.initial = Initial::No;
                    row.epoch += 1;
                }
            }
        }
        let column = |values: Vec<f32>| Tensor::from_slice(&values, values.len(), self.device());
        inner.columns.quant_scale = column(quant_scale)?;
        inner.columns.dequant_scale = column(dequant_scale)?;
        Ok(errors)
    }
}

impl StepCells {
    /// Ends the step without merging it into the running amaxes, and passes what it recorded to `f`.
    fn abort_after<R>(
        &self,
        f: impl FnOnce(&crate::data::columns::Recorded) -> Result<R>,
    ) -> Result<R> {
        let recorded = self.recorded();
        self.abort();
        f(&recorded?)
    }
}
