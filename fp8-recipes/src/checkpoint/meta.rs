//! The metadata of a training checkpoint, and errors about it.

use crate::config::Recipe;
use crate::error::{Error, Result, TrainingCheckpointError, json_error};
use crate::optim::{LossScalerState, OptimizerState};
use fp8_files::SafetensorsFile;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Prefix of the names of the optimizer's tensors.
pub(super) const OPTIMIZER: &str = "optimizer/";
/// Prefix of the names of the FP8 state's columns.
pub(super) const PREFIX: &str = "fp8/";
/// Metadata entry of [`TrainingMeta`].
pub(super) const KEY: &str = "fp8_training";
/// Metadata entry of the FP8 state's rows.
pub(super) const ROWS_KEY: &str = "fp8_state";
/// Metadata entry of the optimizer.
pub(super) const OPTIMIZER_KEY: &str = "fp8_optimizer";

/// The metadata of a training checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingMeta {
    /// Finished optimizer steps.
    pub step: u64,
    /// Recipe of the guard; None for a high-precision run.
    pub recipe: Option<Recipe>,
    /// State of the run's random generator, in a form that the caller chooses.
    pub random: serde_json::Value,
    /// Any other values of the caller, such as its configuration.
    pub extra: serde_json::Value,
}

/// The optimizer in the metadata.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OptimizerMeta {
    kind: String,
    hyperparameters: serde_json::Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scaler: Option<LossScalerState>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    global_steps: Option<u64>,
}

impl OptimizerMeta {
    pub(super) fn of(state: &OptimizerState) -> Self {
        Self {
            kind: state.kind().to_string(),
            hyperparameters: state.hyperparameters_json().clone(),
            loss_scaler: state.loss_scaler().copied(),
            global_steps: state.global_steps(),
        }
    }

    /// The state without its tensors.
    pub(super) fn into_state(self) -> Result<OptimizerState> {
        let mut state =
            OptimizerState::new(self.kind).with_hyperparameters(self.hyperparameters)?;
        if let Some(scaler) = self.loss_scaler {
            state = state.with_loss_scaler(scaler);
        }
        if let Some(steps) = self.global_steps {
            state = state.with_global_steps(steps);
        }
        Ok(state)
    }
}

/// The text of a metadata entry.
pub(super) fn json(path: &Path, what: &'static str, value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| json_error(path, what, error))
}

/// A metadata entry of a file; None if there is no such entry.
pub(super) fn entry<T: DeserializeOwned>(
    file: &SafetensorsFile,
    key: &str,
    what: &'static str,
) -> Result<Option<T>> {
    let value = file.metadata(key).map(serde_json::from_str).transpose();
    value.map_err(|error| json_error(file.path(), what, error))
}

/// Reads the metadata of a training checkpoint without its tensors.
///
/// # Errors
/// If the file cannot be read or is not a training checkpoint.
pub fn training_meta(path: impl AsRef<Path>) -> Result<TrainingMeta> {
    meta_of(&SafetensorsFile::open(path.as_ref())?)
}

pub(super) fn meta_of(file: &SafetensorsFile) -> Result<TrainingMeta> {
    let what = "the training metadata";
    entry(file, KEY, what)?.ok_or_else(|| {
        let reason = format!("there is no `{KEY}` entry: not a training checkpoint");
        json_error(file.path(), what, reason)
    })
}

pub(super) fn mismatch(path: &Path, what: &str, found: String, expected: String) -> Error {
    TrainingCheckpointError::Mismatch {
        path: path.to_path_buf(),
        what: what.to_string(),
        found,
        expected,
    }
    .into()
}

pub(super) fn recipe_text(recipe: Option<&Recipe>) -> String {
    match recipe {
        None => "none (high precision)".into(),
        Some(recipe) => recipe.to_string(),
    }
}
