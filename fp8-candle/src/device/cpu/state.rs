//! The scaling-state table on the host: cells that any thread may record into, and the update of all rows.

use super::elements::{tensor, with_scales, with_slice};
use crate::base::data::columns::{Columns, Recorded, RowUpdate, Updated};
use crate::base::error::{Error, Result};
use crate::device::backend::AmaxCells;
use candle_core::Tensor;
use fp8_core::{SlotUpdate, reciprocal, remake_scale, update_slot};
use std::sync::atomic::{AtomicU32, Ordering};

/// Running amaxes. Magnitudes of f32 have the order of their bits, so a maximum needs no lock.
#[derive(Debug)]
pub(super) struct CpuCells {
    amax: Vec<AtomicU32>,
    non_finite: Vec<AtomicU32>,
}

impl CpuCells {
    pub(super) fn new(rows: usize) -> Self {
        let zeros = || (0..rows).map(|_| AtomicU32::new(0)).collect();
        Self {
            amax: zeros(),
            non_finite: zeros(),
        }
    }
}

fn recorded(amax: Vec<f32>, non_finite: Vec<u32>) -> Result<Recorded> {
    let rows = amax.len();
    Ok(Recorded {
        amax: tensor(amax, rows)?,
        non_finite: tensor(non_finite, rows)?,
    })
}

fn count(cell: &AtomicU32, more: u32) {
    if more > 0 {
        let add = |count: u32| Some(count.saturating_add(more));
        // Never fails: the closure always returns a value.
        let _ = cell.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }
}

impl AmaxCells for CpuCells {
    fn record(&self, row: usize, amax: &Tensor, keep: bool) -> Result<()> {
        let (Some(cell), Some(non_finite)) = (self.amax.get(row), self.non_finite.get(row)) else {
            let cells = self.amax.len();
            return Err(Error::NoCell { row, cells });
        };
        with_scales("record_amax", amax, |values| {
            // The bits of numbers that are not negative have their order: integers have a maximum that vectorizes.
            const INFINITY: u32 = f32::INFINITY.to_bits();
            let (mut largest, mut seen) = (0, 0);
            for value in values {
                let bits = value.abs().to_bits();
                let finite = bits < INFINITY;
                largest = largest.max(if finite { bits } else { 0 });
                seen |= u32::from(!finite);
            }
            if keep {
                cell.fetch_max(largest, Ordering::Relaxed);
            }
            count(non_finite, seen);
            Ok(())
        })
    }

    fn read(&self) -> Result<Recorded> {
        let load = |cell: &AtomicU32| cell.load(Ordering::Relaxed);
        recorded(
            self.amax.iter().map(|c| f32::from_bits(load(c))).collect(),
            self.non_finite.iter().map(load).collect(),
        )
    }

    fn take(&self, which: &[bool]) -> Result<Recorded> {
        let take = |(cell, &which): (&AtomicU32, &bool)| match which {
            true => cell.swap(0, Ordering::Relaxed),
            false => 0,
        };
        let amax = self.amax.iter().zip(which).map(take).map(f32::from_bits);
        let amax = amax.collect();
        let non_finite = self.non_finite.iter().zip(which).map(take).collect();
        recorded(amax, non_finite)
    }

    fn merge(&self, recorded: &Recorded) -> Result<()> {
        with_scales("merge_amaxes", &recorded.amax, |amaxes| {
            for (cell, amax) in self.amax.iter().zip(amaxes) {
                cell.fetch_max(amax.to_bits(), Ordering::Relaxed);
            }
            Ok(())
        })?;
        let counts = &recorded.non_finite;
        with_slice("merge_amaxes", "counts", counts, |counts: &[u32]| {
            for (cell, &more) in self.non_finite.iter().zip(counts) {
                count(cell, more);
            }
            Ok(())
        })
    }
}

/// One delayed-scaling update of all rows, by `fp8-core`.
pub(super) fn update_columns(
    columns: &Columns,
    rows: &[Option<RowUpdate>],
    recorded: &Recorded,
) -> Result<Updated> {
    let len = columns.amax_history.dim(1)?;
    let amaxes = recorded.amax.to_vec1::<f32>()?;
    let counts = recorded.non_finite.to_vec1::<u32>()?;
    let mut quant_scale = columns.quant_scale.to_vec1::<f32>()?;
    let mut dequant_scale = columns.dequant_scale.to_vec1::<f32>()?;
    let mut non_finite = columns.non_finite.to_vec1::<u32>()?;
    for (seen, more) in non_finite.iter_mut().zip(counts) {
        *seen = seen.saturating_add(more);
    }
    let mut history = columns.amax_history.flatten_all()?.to_vec1::<f32>()?;
    let mut changed = vec![false; rows.len()];
    for (row, update) in rows.iter().enumerate() {
        let Some(update) = update else { continue };
        let entries = &mut history[row * len..(row + 1) * len];
        let (entries, beyond) = entries.split_at_mut(update.window.min(len));
        beyond.fill(0.);
        let scale = &mut quant_scale[row];
        let before = *scale;
        let done = update_slot(&update.rule, update.format, amaxes[row], entries, scale);
        if done == SlotUpdate::Updated {
            changed[row] = true;
        } else if update.remake {
            *scale = remake_scale(&update.rule, update.format, entries, *scale);
            changed[row] = scale.to_bits() != before.to_bits();
        }
        if scale.to_bits() != before.to_bits() {
            dequant_scale[row] = reciprocal(*scale);
        }
    }
    let count = rows.len();
    Ok(Updated {
        columns: Columns {
            quant_scale: tensor(quant_scale, count)?,
            dequant_scale: tensor(dequant_scale, count)?,
            amax_history: tensor(history, (count, len))?,
            non_finite: tensor(non_finite, count)?,
        },
        changed: Some(changed),
    })
}
