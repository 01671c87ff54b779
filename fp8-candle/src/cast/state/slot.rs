//! One row, as layers and casts refer to it.

use super::role::Role;
use super::table::{Initial, Row, StateTable};
use crate::base::data::columns::{Columns, Recorded, RowUpdate};
use crate::base::error::{Error, Result};
use crate::device::backend;
use candle_core::{DType, Device, Tensor};
use fp8_core::{
    DelayedRule, Format, StochasticKey, delayed_quant_scale, reciprocal, static_dequant_scale,
};
use std::sync::Arc;

/// A row of a [`StateTable`]: the scaling state of one tensor role of one layer.
#[derive(Debug, Clone)]
pub struct Slot {
    table: Arc<StateTable>,
    row: usize,
}

/// Equal if both are the same row of the same table.
impl PartialEq for Slot {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.table, &other.table) && self.row == other.row
    }
}

/// The numbers of one row, as views of the columns.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SlotTensors {
    /// f32 `[1]`, the factor before the cast.
    pub quant_scale: Tensor,
    /// f32 `[1]`, the factor after decoding.
    pub dequant_scale: Tensor,
    /// f32 `[amax_history_len]`, newest first.
    pub amax_history: Tensor,
    /// U32 `[1]`, how many recorded amaxes were Inf or NaN.
    pub non_finite: Tensor,
}

/// Micro-batches differ in the key. Odd, so that no two of them share one.
const MICRO_BATCH: u64 = 0xbf58_476d_1ce4_e5b9;

/// quant_scale and dequant_scale, f32 `[1]` each.
pub(crate) type Scales = (Tensor, Tensor);

impl Slot {
    /// Row `row` of `table`.
    pub fn new(table: &Arc<StateTable>, row: usize) -> Self {
        Self {
            table: table.clone(),
            row,
        }
    }

    /// The only row of a new table, for casts outside of a model.
    pub fn alone(path: &str, role: Role, amax_history_len: usize, device: &Device) -> Result<Self> {
        let table = StateTable::new(device)?;
        let row = table.add_rows(&[(path, role)], amax_history_len)?;
        Ok(Self { table, row })
    }

    /// The table.
    pub fn table(&self) -> &Arc<StateTable> {
        &self.table
    }

    /// The index in the table.
    pub fn row(&self) -> usize {
        self.row
    }

    fn with<R>(&self, f: impl FnOnce(&mut Row, &Columns) -> R) -> R {
        let mut inner = self.table.lock();
        let columns = inner.columns.clone();
        f(&mut inner.rows[self.row], &columns)
    }

    /// Path of the layer, a dot, the role.
    pub fn name(&self) -> Arc<str> {
        self.with(|row, _| row.name.clone())
    }

    /// Device of the state.
    pub fn device(&self) -> &Device {
        self.table.device()
    }

    /// The current numbers.
    pub fn tensors(&self) -> Result<SlotTensors> {
        let (window, columns) = self.with(|row, columns| (row.window, columns.clone()));
        let one = |column: &Tensor| column.narrow(0, self.row, 1);
        let history = one(&columns.amax_history)?.squeeze(0)?;
        Ok(SlotTensors {
            quant_scale: one(&columns.quant_scale)?,
            dequant_scale: one(&columns.dequant_scale)?,
            amax_history: history.narrow(0, 0, window.min(history.elem_count()))?,
            non_finite: one(&self.table.non_finite_counts()?)?,
        })
    }

    /// How often an update has set the scale, and how often it was set from outside.
    pub fn version(&self) -> (u64, u64) {
        self.with(|row, _| (row.generation, row.epoch))
    }

    /// The amax from calibration, if it still describes the layer.
    pub fn calibrated_amax(&self) -> Option<f32> {
        self.with(|row, _| row.calibrated_amax)
    }

    /// Whether the row holds a static scale from calibration.
    pub fn is_calibrated(&self) -> bool {
        self.calibrated_amax().is_some()
    }

    /// Forgets the amaxes of earlier calibrations. The scale stays until the next calibration ends.
    pub fn reset_calibration(&self) {
        self.with(|row, _| row.calibrated_amax = None);
    }

    /// How many recorded amaxes were Inf or NaN. Copies one number to the host.
    pub fn non_finite_count(&self) -> Result<u32> {
        Ok(self.tensors()?.non_finite.to_vec1::<u32>()?.iter().sum())
    }

    /// The key for the next stochastic rounding of this tensor. No two roundings of a table use the same bits, in any step,
    /// because the number of roundings is part of the table and of its checkpoints. `seed` is the run's; the tensor's id is
    /// made from the row's name, so that two models of one run whose layers have the same names need two seeds. Each `micro_batch` of a
    /// step has bits and a count of its own, see [`Draw::Next`](crate::Draw::Next).
    pub fn next_stochastic_key(&self, seed: u64, micro_batch: u32) -> StochasticKey {
        let key = self.stochastic_key(seed ^ MICRO_BATCH.wrapping_mul(micro_batch.into()));
        self.with(|row, _| {
            let draws = row.draws.entry(micro_batch).or_default();
            let step = *draws;
            *draws = draws.wrapping_add(1);
            StochasticKey { step, ..key }
        })
    }

    /// [`Slot::next_stochastic_key`] without drawing: the number of roundings stays.
    pub(crate) fn stochastic_key(&self, seed: u64) -> StochasticKey {
        self.with(|row, _| StochasticKey {
            seed,
            step: row.draws.get(&0).copied().unwrap_or(0),
            tensor: row.id,
        })
    }

    /// Whether no scale has been set yet, by an update or from outside.
    pub(crate) fn is_initial(&self) -> Result<bool> {
        match self.with(|row, _| row.initial) {
            Initial::Yes => Ok(true),
            Initial::No => Ok(false),
            Initial::Unknown => {
                // One number to the host, until the first amax has been recorded.
                let history = self.tensors()?.amax_history;
                let made =
                    history.elem_count() == 0 || history.narrow(0, 0, 1)?.to_vec1::<f32>()? != [0.];
                if made {
                    self.with(|row, _| row.initial = Initial::No);
                }
                Ok(!made)
            }
        }
    }

    /// Whether the row's scale was made for `format`, or is the initial one.
    pub(crate) fn is_made_for(&self, format: Format) -> bool {
        self.with(|row, _| row.format.is_none_or(|made_for| made_for == format))
    }

    /// Whether the row's scale was made by `rule`, as far as is known.
    pub(crate) fn is_made_by(&self, rule: &DelayedRule) -> bool {
        self.with(|row, _| row.is_made_by(rule))
    }

    /// The scale of a delayed cast to `format`: the row's own or, if that was made for another format, one made from its
    /// history. The row is not changed; the next update makes its scale for the new format.
    pub(crate) fn delayed_scale(&self, format: Format, rule: &DelayedRule) -> Result<Scales> {
        let (made_for, calibrated) = self.with(|row, _| (row.format, row.calibrated_amax));
        match (made_for, calibrated) {
            (Some(made_for), Some(amax)) if made_for != format => {
                let quant_scale = delayed_quant_scale(amax, format, rule.margin, 1.);
                self.scales_of(reciprocal(rule.scale_rounding.apply(quant_scale)))
            }
            (Some(made_for), None) if made_for != format => {
                let nothing = Tensor::zeros(1, DType::F32, self.device())?;
                self.made_scale(&nothing, format, rule)
            }
            _ => self.scales(),
        }
    }

    /// The row's current scales.
    fn scales(&self) -> Result<Scales> {
        let columns = self.table.columns();
        let one = |column: &Tensor| column.narrow(0, self.row, 1);
        Ok((one(&columns.quant_scale)?, one(&columns.dequant_scale)?))
    }

    /// The scale that this row would have after an update with `amax`, f32 `[1]`. With 0 it is made from the history alone.
    pub(crate) fn made_scale(
        &self,
        amax: &Tensor,
        format: Format,
        rule: &DelayedRule,
    ) -> Result<Scales> {
        let state = self.tensors()?;
        let window = state.amax_history.elem_count();
        let columns = Columns {
            amax_history: state.amax_history.unsqueeze(0)?.contiguous()?,
            quant_scale: state.quant_scale,
            dequant_scale: state.dequant_scale,
            non_finite: state.non_finite,
        };
        let update = RowUpdate {
            rule: rule.clone(),
            format,
            window,
            remake: true,
        };
        let recorded = Recorded {
            amax: amax.clone(),
            non_finite: Tensor::zeros(1, DType::U32, self.device())?,
        };
        let made = backend(self.device())?.update_columns(&columns, &[Some(update)], &recorded)?;
        Ok((made.columns.quant_scale, made.columns.dequant_scale))
    }

    /// The scale from calibration, for `format`.
    ///
    /// # Errors
    /// If the row is not calibrated.
    pub(crate) fn static_scale(&self, format: Format) -> Result<Scales> {
        match self.with(|row, _| (row.calibrated_amax, row.format)) {
            (None, _) => Err(Error::NotCalibrated(self.name().to_string())),
            (Some(_), Some(made_for)) if made_for == format => self.scales(),
            (Some(amax), _) => self.static_from(amax, format),
        }
    }

    fn static_from(&self, amax: f32, format: Format) -> Result<Scales> {
        let dequant_scale =
            static_dequant_scale(amax, format).map_err(|source| Error::Calibration {
                slot: self.name().to_string(),
                source,
            })?;
        self.scales_of(dequant_scale)
    }

    /// The scales of a calibrated row with this dequant_scale.
    fn scales_of(&self, dequant_scale: f32) -> Result<Scales> {
        let one = |value: f32| Tensor::from_slice(&[value], 1, self.device());
        let quant_scale = reciprocal(dequant_scale).min(f32::MAX);
        Ok((one(quant_scale)?, one(dequant_scale)?))
    }
}
