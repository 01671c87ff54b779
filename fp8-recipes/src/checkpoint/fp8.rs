//! The FP8 state in a checkpoint: the columns of the model's tables, one row for each layer and role, sorted by name.
//!
//! | tensor | shape | |
//! |---|---|---|
//! | `fp8/quant_scale`, `fp8/dequant_scale` | f32 `[rows]` | |
//! | `fp8/amax_history` | f32 `[rows, len]` | newest first, shorter histories end in zeros |
//! | `fp8/calibrated_amax` | f32 `[rows]` | 0 where a row is not calibrated |
//! | `fp8/kept_quant_scale` | f32 `[rows]` | of weights that the last step did not change; 0 elsewhere |
//! | `fp8/non_finite` | U32 `[rows]` | |
//!
//! All other values of a row are in the metadata, in the same order.

use super::meta::{PREFIX, ROWS_KEY, entry, mismatch};
use super::prepared::{PreparedLayer, prepared_layers};
use crate::FilesError;
use crate::autocast::{Calibration, take_dropped};
use crate::config::Recipe;
use crate::error::{Error, Result};
use crate::module::Fp8Module;
use candle_core::{DType, Device, Tensor};
use fp8_candle::Role;
use fp8_candle::state::SavedRow;
use fp8_core::Format;
use fp8_files::SafetensorsFile;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

/// The rows of a checkpoint, by name.
pub type Fp8Rows = BTreeMap<String, SavedRow>;

/// A row in the metadata.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct RowMeta {
    name: String,
    history_len: usize,
    format: Option<Format>,
    calibrated: bool,
    /// Of the first micro-batch of each step.
    draws: u32,
    /// Of the other micro-batches.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    more_draws: BTreeMap<u32, u32>,
    id: u32,
}

/// The metadata entry.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Meta {
    rows: Vec<RowMeta>,
    calibrated_layers: BTreeMap<String, Calibration>,
    /// Recipes of layers that have their own.
    #[serde(default)]
    layer_recipes: BTreeMap<String, Recipe>,
}

/// The FP8 state in a checkpoint.
#[derive(Default)]
pub(super) struct StoredState {
    rows: Fp8Rows,
    kept: BTreeMap<String, f32>,
    calibrations: BTreeMap<String, Calibration>,
    layer_recipes: BTreeMap<String, Recipe>,
}

/// The FP8 state of every prepared layer, by name: path of the layer, a dot, the role. Histories may be of any length.
///
/// # Errors
/// If two layers with different state have one path.
pub fn fp8_state<M: Fp8Module + ?Sized>(model: &M) -> Result<Fp8Rows> {
    rows(&prepared_layers(model))
}

/// Every row of the prepared layers.
///
/// # Errors
/// If two layers with different state have one path, or the state cannot be copied from its device.
fn rows(layers: &[PreparedLayer]) -> Result<Fp8Rows> {
    let mut rows = Fp8Rows::new();
    let mut saved_tables = vec![];
    for layer in layers {
        let table = layer.state.table();
        let key = Arc::as_ptr(table) as usize;
        let at = match saved_tables.iter().position(|(other, _)| *other == key) {
            Some(at) => at,
            None => {
                saved_tables.push((key, table.save()?));
                saved_tables.len() - 1
            }
        };
        for (_, slot) in layer.state.slots() {
            let (name, row) = &saved_tables[at].1[slot.row()];
            if rows.insert(name.to_string(), row.clone()).is_some() {
                return Err(FilesError::NameClash {
                    tensor: name.to_string(),
                }
                .into());
            }
        }
    }
    Ok(rows)
}

/// Tensors and metadata of the state of `layers`.
pub(super) fn save(layers: &[PreparedLayer]) -> Result<(BTreeMap<String, Tensor>, Meta)> {
    let rows = rows(layers)?;
    let mut kept = BTreeMap::new();
    let mut meta = Meta::default();
    for PreparedLayer { weight, state } in layers {
        if let (Some(weight), Some(slot)) = (weight, state.slot(Role::Weight))
            && let Some(scale) = state.cache.kept_quant_scale(weight)?
        {
            kept.insert(slot.name().to_string(), scale.to_vec1::<f32>()?[0]);
        }
        if let Some(calibration) = state.calibration() {
            meta.calibrated_layers
                .insert(state.path().into(), calibration);
        }
        if let Some(recipe) = state.own_recipe() {
            meta.layer_recipes.insert(state.path().into(), recipe);
        }
    }
    let len = rows.values().map(|row| row.amax_history.len()).max();
    let len = len.unwrap_or(0);
    let mut histories = vec![];
    for (name, row) in &rows {
        let end = histories.len() + len;
        histories.extend_from_slice(&row.amax_history);
        histories.resize(end, 0f32);
        let mut more_draws = row.draws.clone();
        let draws = more_draws.remove(&0).unwrap_or(0);
        meta.rows.push(RowMeta {
            name: name.clone(),
            history_len: row.amax_history.len(),
            format: row.format,
            calibrated: row.calibrated_amax.is_some(),
            draws,
            more_draws,
            id: row.id,
        });
    }
    let column = |value: &dyn Fn(&str, &SavedRow) -> f32| {
        let values: Vec<f32> = rows.iter().map(|(name, row)| value(name, row)).collect();
        Tensor::from_vec(values, rows.len(), &Device::Cpu)
    };
    let counts: Vec<u32> = rows.values().map(|row| row.non_finite).collect();
    let mut tensors = BTreeMap::new();
    if !rows.is_empty() {
        tensors = BTreeMap::from([
            ("quant_scale", column(&|_, row| row.quant_scale)?),
            ("dequant_scale", column(&|_, row| row.dequant_scale)?),
            (
                "amax_history",
                Tensor::from_vec(histories, (rows.len(), len), &Device::Cpu)?,
            ),
            (
                "calibrated_amax",
                column(&|_, row| row.calibrated_amax.unwrap_or(0.))?,
            ),
            (
                "kept_quant_scale",
                column(&|name, _| kept.get(name).copied().unwrap_or(0.))?,
            ),
            (
                "non_finite",
                Tensor::from_vec(counts, rows.len(), &Device::Cpu)?,
            ),
        ]);
    }
    let named = tensors.into_iter();
    Ok((
        named
            .map(|(name, t)| (format!("{PREFIX}{name}"), t))
            .collect(),
        meta,
    ))
}

/// The metadata entry of a file; the default without one.
pub(super) fn rows_of(file: &SafetensorsFile) -> Result<Meta> {
    Ok(entry(file, ROWS_KEY, "the FP8 state")?.unwrap_or_default())
}

/// Moves the state out of the tensors of a checkpoint and checks that it is complete.
pub(super) fn take(
    path: &Path,
    stored: &mut BTreeMap<String, Tensor>,
    meta: Meta,
) -> Result<StoredState> {
    let count = meta.rows.len();
    let mut column = |name: &str, dtype: DType, dims: &[usize]| -> Result<Tensor> {
        let name = format!("{PREFIX}{name}");
        let what = || format!("tensor `{name}`");
        let expected = format!("{} {dims:?}", dtype.as_str());
        let tensor = stored.remove(&name);
        match tensor {
            None => Err(mismatch(path, &what(), "missing".into(), expected)),
            Some(t) if t.dtype() != dtype || t.dims() != dims => {
                let found = format!("{} {:?}", t.dtype().as_str(), t.dims());
                Err(mismatch(path, &what(), found, expected))
            }
            Some(t) => Ok(t),
        }
    };
    if count == 0 {
        return Ok(StoredState::default());
    }
    let len = meta.rows.iter().map(|row| row.history_len).max();
    let len = len.unwrap_or(0);
    let quant_scale = column("quant_scale", DType::F32, &[count])?.to_vec1::<f32>()?;
    let dequant_scale = column("dequant_scale", DType::F32, &[count])?.to_vec1::<f32>()?;
    let calibrated = column("calibrated_amax", DType::F32, &[count])?.to_vec1::<f32>()?;
    let kept_scales = column("kept_quant_scale", DType::F32, &[count])?.to_vec1::<f32>()?;
    let non_finite = column("non_finite", DType::U32, &[count])?.to_vec1::<u32>()?;
    let histories = column("amax_history", DType::F32, &[count, len])?;
    let mut rows = Fp8Rows::new();
    let mut kept = BTreeMap::new();
    for (i, row) in meta.rows.into_iter().enumerate() {
        let saved = SavedRow {
            quant_scale: quant_scale[i],
            dequant_scale: dequant_scale[i],
            amax_history: histories.get(i)?.narrow(0, 0, row.history_len)?.to_vec1()?,
            non_finite: non_finite[i],
            calibrated_amax: row.calibrated.then_some(calibrated[i]),
            format: row.format,
            draws: match row.draws {
                0 => row.more_draws,
                draws => row.more_draws.into_iter().chain([(0, draws)]).collect(),
            },
            id: row.id,
        };
        check(&saved, &row.name)?;
        if kept_scales[i] != 0. {
            let with_kept = SavedRow {
                quant_scale: kept_scales[i],
                dequant_scale: fp8_core::reciprocal(kept_scales[i]),
                ..saved.clone()
            };
            check(&with_kept, &format!("{}.kept", row.name))?;
            kept.insert(row.name.clone(), kept_scales[i]);
        }
        if rows.insert(row.name.clone(), saved).is_some() {
            return Err(FilesError::NameClash { tensor: row.name }.into());
        }
    }
    Ok(StoredState {
        rows,
        kept,
        calibrations: meta.calibrated_layers,
        layer_recipes: meta.layer_recipes,
    })
}

/// Rejects numbers that no step can have produced.
fn check(row: &SavedRow, name: &str) -> Result<()> {
    use fp8_candle::Error::StateValue;
    row.check(name).map_err(|error| match error {
        StateValue {
            tensor,
            index,
            value,
            expected,
        } => FilesError::TensorValue {
            tensor,
            index,
            value: value.into(),
            expected: expected.to_string(),
        }
        .into(),
        other => other.into(),
    })
}

impl StoredState {
    /// The state of `layers` as [`prepare_fp8`](crate::prepare_fp8) makes it.
    pub(super) fn fresh(layers: &[PreparedLayer]) -> Result<Self> {
        let mut rows = rows(layers)?;
        for row in rows.values_mut() {
            *row = SavedRow {
                quant_scale: 1.,
                dequant_scale: 1.,
                amax_history: vec![0.; row.amax_history.len()],
                non_finite: 0,
                calibrated_amax: None,
                format: None,
                draws: BTreeMap::new(),
                id: row.id,
            };
        }
        Ok(Self {
            rows,
            ..Self::default()
        })
    }

    /// Checks that the model has the same rows.
    pub(super) fn check(&self, path: &Path, layers: &[PreparedLayer]) -> Result<()> {
        let here = rows(layers)?;
        let missing = (here.keys()).find(|name| !self.rows.contains_key(*name));
        if let Some(name) = missing {
            let what = format!("FP8 state `{name}`");
            return Err(mismatch(path, &what, "missing".into(), "a row".into()));
        }
        if let Some(name) = self.rows.keys().find(|name| !here.contains_key(*name)) {
            let what = format!("FP8 state `{name}`");
            return Err(mismatch(path, &what, "a row".into(), "missing".into()));
        }
        Ok(())
    }

    /// An error for the first layer whose own recipe differs from the checkpoint's.
    pub(super) fn other_recipe(&self, path: &Path, layers: &[PreparedLayer]) -> Option<Error> {
        layers.iter().find_map(|PreparedLayer { state, .. }| {
            let (here, there) = (state.own_recipe(), self.layer_recipes.get(state.path()));
            let text = |recipe: Option<&Recipe>| match recipe {
                None => "the guard's".to_string(),
                Some(recipe) => recipe.to_string(),
            };
            (here.as_ref() != there).then(|| {
                let what = format!("the recipe of layer `{}`", state.path());
                mismatch(path, &what, text(there), text(here.as_ref()))
            })
        })
    }

    /// Restores the state into layers that [`StoredState::check`] has accepted, or that it was made for.
    pub(super) fn restore(&self, layers: &[PreparedLayer]) -> Result<()> {
        let mut tables: Vec<Arc<fp8_candle::StateTable>> = vec![];
        for PreparedLayer { state, .. } in layers {
            if !tables.iter().any(|table| Arc::ptr_eq(table, state.table())) {
                tables.push(state.table().clone());
            }
        }
        for table in tables {
            let states = layers.iter().map(|layer| &layer.state);
            let here = states.filter(|state| Arc::ptr_eq(state.table(), &table));
            let rows = here.flat_map(|state| state.slots()).map(|(_, slot)| {
                let saved = self.rows[&*slot.name()].clone();
                (slot.row(), saved)
            });
            table.restore(&rows.collect::<Vec<_>>())?;
        }
        layers
            .iter()
            .try_for_each(|layer| self.restore_layer(layer))?;
        // The run continues from the checkpoint: a step that was dropped before is no longer part of it.
        take_dropped();
        Ok(())
    }

    fn restore_layer(&self, PreparedLayer { weight, state }: &PreparedLayer) -> Result<()> {
        let kept = state
            .slot(Role::Weight)
            .and_then(|slot| self.kept.get(&*slot.name()));
        match (weight, kept) {
            (Some(weight), Some(&scale)) => {
                let scale = Tensor::from_slice(&[scale], 1, weight.device())?;
                state.cache.restore(weight, scale)?;
            }
            _ => state.cache.clear(),
        }
        state.set_calibration(self.calibrations.get(state.path()).copied());
        Ok(())
    }
}
