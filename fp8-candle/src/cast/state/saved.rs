//! The state of a row as stored in checkpoints.

use super::slot::Slot;
use super::table::{Initial, StateTable};
use crate::base::check::{check_dims, check_dtype};
use crate::base::error::{Error, Result, shape_error};
use candle_core::{DType, Device, Tensor};
use fp8_core::Format;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Everything about one row that a later run needs to continue bit-exactly. Amaxes waiting for an update are not included.
#[derive(Debug, Clone, PartialEq)]
pub struct SavedRow {
    /// The factor before the cast.
    pub quant_scale: f32,
    /// The factor after decoding. It is the rounded reciprocal of the quant_scale, unless calibration made it: then the quant_scale is its reciprocal.
    pub dequant_scale: f32,
    /// Newest first.
    pub amax_history: Vec<f32>,
    /// How many casts saw Inf or NaN.
    pub non_finite: u32,
    /// The amax that calibration found, if it still describes the layer.
    pub calibrated_amax: Option<f32>,
    /// The format that the scale was made for; `None` for the initial scale.
    pub format: Option<Format>,
    /// Stochastic roundings so far, by the place of the micro-batch in its step.
    pub draws: BTreeMap<u32, u32>,
    /// The row's tensor id in stochastic rounding.
    pub id: u32,
}

impl SavedRow {
    /// Checks that these are values that a step can produce.
    ///
    /// # Errors
    /// [`Error::StateValue`] with the first other value.
    pub fn check(&self, name: &str) -> Result<()> {
        let fault = |column: &str, index, value, expected| Error::StateValue {
            tensor: format!("{name}.{column}"),
            index,
            value,
            expected,
        };
        let scale = self.quant_scale;
        // Its reciprocal may be subnormal, as the reciprocal of the largest f32 is, where delayed scaling saturates.
        if !(scale > 0. && scale.is_normal()) {
            let expected = "positive, finite and not subnormal, as a quant_scale has to be";
            return Err(fault("quant_scale", 0, scale, expected));
        }
        let other = self.dequant_scale;
        let off = (scale * other - 1.).abs();
        if off.is_nan() || off > 1e-5 {
            let expected = "the reciprocal of quant_scale";
            return Err(fault("dequant_scale", 0, other, expected));
        }
        let columns = [
            ("amax_history", &self.amax_history[..]),
            ("calibrated_amax", self.calibrated_amax.as_slice()),
        ];
        for (column, amaxes) in columns {
            let is_bad = |amax: &f32| !(amax.is_finite() && amax.is_sign_positive());
            if let Some(index) = amaxes.iter().position(is_bad) {
                let expected = "finite and not negative, as an amax has to be";
                return Err(fault(column, index, amaxes[index], expected));
            }
        }
        Ok(())
    }
}

impl StateTable {
    /// Every row, with its name. Copies the columns to the host.
    pub fn save(&self) -> Result<Vec<(Arc<str>, SavedRow)>> {
        let counts = self.non_finite_counts()?.to_vec1::<u32>()?;
        let inner = self.lock();
        let quant_scale = inner.columns.quant_scale.to_vec1::<f32>()?;
        let dequant_scale = inner.columns.dequant_scale.to_vec1::<f32>()?;
        let history = inner.columns.amax_history.to_device(&Device::Cpu)?;
        let row = |(index, row): (usize, &super::table::Row)| {
            let entries = history.get(index)?.to_vec1::<f32>()?;
            let saved = SavedRow {
                quant_scale: quant_scale[index],
                dequant_scale: dequant_scale[index],
                amax_history: entries[..row.window.min(entries.len())].to_vec(),
                non_finite: counts[index],
                calibrated_amax: row.calibrated_amax,
                format: row.format,
                draws: row.draws.clone(),
                id: row.id,
            };
            Ok((row.name.clone(), saved))
        };
        inner.rows.iter().enumerate().map(row).collect()
    }

    /// How often each row has rounded stochastically, by micro-batch.
    pub fn draws(&self) -> Vec<BTreeMap<u32, u32>> {
        let inner = self.lock();
        inner.rows.iter().map(|row| row.draws.clone()).collect()
    }

    /// Adds the draws of another rank's table with the same rows: where both have counted a micro-batch, the larger number counts.
    pub fn merge_draws(&self, others: &[BTreeMap<u32, u32>]) {
        for (row, others) in self.lock().rows.iter_mut().zip(others) {
            for (&micro_batch, &draws) in others {
                let own = row.draws.entry(micro_batch).or_default();
                *own = draws.max(*own);
            }
        }
    }

    /// Puts rows back. Amaxes waiting for an update are dropped, and no gradients are due.
    ///
    /// # Errors
    /// If a row does not pass [`SavedRow::check`] or the table has no row of that index; nothing is changed then.
    pub fn restore(&self, rows: &[(usize, SavedRow)]) -> Result<()> {
        let mut inner = self.lock();
        let count = inner.rows.len();
        for (index, saved) in rows {
            let Some(row) = inner.rows.get(*index) else {
                return Err(Error::NoRow {
                    row: *index,
                    rows: count,
                });
            };
            saved.check(&row.name)?;
        }
        let lengths = rows.iter().map(|(_, saved)| saved.amax_history.len());
        let have = inner.columns.amax_history.dim(1)?;
        let len = lengths.max().unwrap_or(0).max(have);
        let mut quant_scale = inner.columns.quant_scale.to_vec1::<f32>()?;
        let mut dequant_scale = inner.columns.dequant_scale.to_vec1::<f32>()?;
        let mut non_finite = inner.columns.non_finite.to_vec1::<u32>()?;
        let histories = super::table::longer(&inner.columns.amax_history, len)?;
        let mut histories = histories.flatten_all()?.to_vec1::<f32>()?;
        // Amaxes of an unfinished step belong to the old state.
        self.running().take(&vec![true; count])?;
        for (index, saved) in rows {
            quant_scale[*index] = saved.quant_scale;
            dequant_scale[*index] = saved.dequant_scale;
            non_finite[*index] = saved.non_finite;
            let entries = &mut histories[index * len..(index + 1) * len];
            entries.fill(0.);
            entries[..saved.amax_history.len()].copy_from_slice(&saved.amax_history);
            let row = &mut inner.rows[*index];
            let used = saved.amax_history.iter().any(|&amax| amax != 0.);
            let initial = !used && saved.calibrated_amax.is_none() && saved.quant_scale == 1.;
            row.initial = if initial { Initial::Yes } else { Initial::No };
            row.generation = used.into();
            row.epoch += 1;
            row.format = saved.format;
            row.made_by = None;
            row.window = saved.amax_history.len();
            row.calibrated_amax = saved.calibrated_amax;
            (row.draws, row.id) = (saved.draws.clone(), saved.id);
            row.touched = false;
        }
        let device = self.device();
        inner.columns.quant_scale = Tensor::from_vec(quant_scale, count, device)?;
        inner.columns.dequant_scale = Tensor::from_vec(dequant_scale, count, device)?;
        inner.columns.amax_history = Tensor::from_vec(histories, (count, len), device)?;
        inner.columns.non_finite = Tensor::from_vec(non_finite, count, device)?;
        inner.reported = inner.columns.non_finite.clone();
        self.restart_window(inner.columns.non_finite.clone());
        inner.gradients_due = false;
        Ok(())
    }
}

impl Slot {
    /// Sets the scale and the history, as [`StateTable::restore`] does for a whole table: quant_scale f32 `[1]`,
    /// amax_history f32 `[len]`.
    ///
    /// # Errors
    /// If a shape, dtype or value is wrong.
    pub fn restore(&self, quant_scale: &Tensor, amax_history: &Tensor) -> Result<()> {
        const OP: &str = "restore delayed state";
        for (what, tensor) in [("quant_scale", quant_scale), ("amax_history", amax_history)] {
            check_dtype(OP, what, tensor, DType::F32)?;
        }
        check_dims(OP, "quant_scale", quant_scale, &[1])?;
        if amax_history.rank() != 1 {
            let got = amax_history.dims();
            return Err(shape_error(OP, "amax_history", "one dimension", got));
        }
        let (_, now) = self.table().save()?.swap_remove(self.row());
        let quant_scale = quant_scale.to_vec1::<f32>()?[0];
        let saved = SavedRow {
            quant_scale,
            dequant_scale: fp8_core::reciprocal(quant_scale),
            amax_history: amax_history.to_vec1()?,
            calibrated_amax: None,
            ..now
        };
        self.table().restore(&[(self.row(), saved)])
    }
}
