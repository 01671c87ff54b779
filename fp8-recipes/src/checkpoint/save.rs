//! Writing a training checkpoint.

use super::fp8;
use super::meta::{KEY, OPTIMIZER, OPTIMIZER_KEY, OptimizerMeta, ROWS_KEY, TrainingMeta, json};
use super::prepared::{PreparedLayer, settled_layers};
use crate::FilesError;
use crate::atomic::write_safetensors_atomic;
use crate::error::Result;
use crate::module::Fp8Module;
use crate::nn::scaled_parameter::refuse_scaled_model;
use crate::optim::{OptimizerState, ResumableOptimizer};
use candle_core::Tensor;
use candle_nn::VarMap;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::PoisonError;

/// Saves variables, optimizer and FP8 state atomically: a crash leaves the old file or the new one.
///
/// `optimizer` is any [`ResumableOptimizer`]: this library's, candle-nn's, your own, or
/// [`NoOptimizer`](crate::optim::NoOptimizer).
///
/// Ends the step first, as [`end_step`](crate::end_step) does: inside a guard, save after the optimizer's step. Later steps compute what they
/// would without the checkpoint.
///
/// # Errors
/// If a tensor cannot be read or the file not written; the old file survives.
/// [`UnfinishedStep`](crate::TrainingCheckpointError::UnfinishedStep) in the middle of a step, after casts of an open guard on this thread and
/// before the step of an optimizer that [announces its changes](ResumableOptimizer::announces_changes); nothing changes then. With another
/// one, whose step may have passed unnoticed, saving ends the step, and the first time warns in `tracing`.
/// [`Error::ScaledParameter`](crate::Error::ScaledParameter) for a model with scaled parameters, which
/// [`scaled::save_training`](crate::scaled::save_training) saves.
pub fn save_training<M: Fp8Module + ?Sized, O: ResumableOptimizer + ?Sized>(
    path: impl AsRef<Path>,
    model: &M,
    vars: &VarMap,
    optimizer: &O,
    meta: &TrainingMeta,
) -> Result<()> {
    refuse_scaled_model(
        model,
        "checkpoint::save_training",
        "call scaled::save_training",
    )?;
    let layers = settled_layers(model, optimizer.announces_changes())?;
    let optimizer = optimizer.optimizer_state()?;
    write(
        path.as_ref(),
        variables(vars),
        Some(&layers),
        &optimizer,
        meta,
    )
}

/// Writes a training checkpoint of variables, the optimizer, and the FP8 state of `layers`, if it is to be in this file.
pub(super) fn write(
    path: &Path,
    mut tensors: BTreeMap<String, Tensor>,
    layers: Option<&[PreparedLayer]>,
    optimizer: &OptimizerState,
    meta: &TrainingMeta,
) -> Result<()> {
    let saved = layers.map(fp8::save).transpose()?;
    let (state, rows) = saved.unwrap_or_default();
    let optimizer_meta = OptimizerMeta::of(optimizer);
    let optimizer = optimizer.tensors().iter();
    let optimizer = optimizer.map(|(name, t)| (format!("{OPTIMIZER}{name}"), t.clone()));
    for (name, tensor) in state.into_iter().chain(optimizer) {
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(FilesError::NameClash { tensor: name }.into());
        }
    }
    let metadata = HashMap::from([
        (KEY.to_string(), json(path, "the training metadata", meta)?),
        (ROWS_KEY.to_string(), json(path, "the FP8 state", &rows)?),
        (
            OPTIMIZER_KEY.to_string(),
            json(path, "the optimizer", &optimizer_meta)?,
        ),
    ]);
    Ok(write_safetensors_atomic(path, &tensors, Some(&metadata))?)
}

/// The variables by name, detached.
pub(super) fn variables(vars: &VarMap) -> BTreeMap<String, Tensor> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    vars.iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().detach()))
        .collect()
}
