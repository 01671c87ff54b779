//! Checkpoints of scaled training.

use crate::FilesError;
use crate::atomic::write_safetensors_atomic;
use crate::error::{Result, json_error};
use crate::optim::{LossScalerState, OptimizerState, ResumableOptimizer};
use crate::warning::warn_of_lost_scaler;
use candle_core::{Device, Tensor};
use fp8_files::SafetensorsFile;
use fp8_scaled::files::{OPTIMIZER_PREFIX, StoredTree, TRAINING_KEY, stored, take};
use fp8_scaled::{ScaleStorage, ScaledVarMap};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// What a checkpoint of scaled training holds besides tensors.
///
/// ```
/// # use fp8_recipes::scaled::*;
/// let state = TrainingState::new(7).with_extra("epoch", 2);
/// assert_eq!((state.step, state.extra["epoch"].as_u64()), (7, Some(2)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct TrainingState {
    /// Finished steps of the program.
    pub step: u64,
    /// Values of the program, such as the state of its data loader.
    #[serde(default)]
    pub extra: BTreeMap<String, Value>,
}

impl TrainingState {
    /// After `step` steps, with nothing extra.
    pub fn new(step: u64) -> Self {
        Self {
            step,
            extra: BTreeMap::new(),
        }
    }

    /// A copy with another extra value.
    pub fn with_extra(mut self, key: impl Into<String>, value: impl Into<Value>) -> Self {
        self.extra.insert(key.into(), value.into());
        self
    }
}

/// The entry in the metadata.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TrainingEntry {
    training: TrainingState,
    optimizer: String,
    hyperparameters: Value,
    // Files from before these were saved have neither.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scaler: Option<LossScalerState>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    global_steps: Option<u64>,
}

impl TrainingEntry {
    fn of(training: &TrainingState, state: &OptimizerState) -> Self {
        Self {
            training: training.clone(),
            optimizer: state.kind().to_string(),
            hyperparameters: state.hyperparameters_json().clone(),
            loss_scaler: state.loss_scaler().copied(),
            global_steps: state.global_steps(),
        }
    }

    /// The state of the optimizer without its tensors, and that of the training.
    fn into_states(self) -> Result<(OptimizerState, TrainingState)> {
        let mut state =
            OptimizerState::new(self.optimizer).with_hyperparameters(self.hyperparameters)?;
        if let Some(scaler) = self.loss_scaler {
            state = state.with_loss_scaler(scaler);
        }
        if let Some(steps) = self.global_steps {
            state = state.with_global_steps(steps);
        }
        Ok((state, self.training))
    }
}

/// Saves everything that training needs to continue: parameters with their scales, the state of the optimizer, with that of a loss scaler
/// that drives it, and `training`. The file at `path` is replaced atomically.
///
/// # Errors
/// [`FilesError::Write`](crate::FilesError::Write); [`FilesError::NameClash`](crate::FilesError::NameClash) if the name of a
/// parameter begins like those of the optimizer's tensors, `optimizer/..`.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::ScaledVar;
/// use fp8::optim::SgdConfig;
/// use fp8::optim::scaled::ScaledSgd;
/// use fp8::scaled::{ScaledVarMap, TrainingState, resume_training, save_training, training_state};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("run.safetensors");
/// let params = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
/// params.insert(&ScaledVar::new("w", &Tensor::ones(4, DType::F16, &Device::Cpu)?)?)?;
/// let mut sgd = ScaledSgd::new(&params, SgdConfig::default())?;
/// save_training(&path, &params, &sgd, &TrainingState::new(7))?;
/// assert_eq!(training_state(&path)?.step, 7);
/// assert_eq!(resume_training(&path, &params, &mut sgd)?.step, 7);
/// # Ok(()) }
/// ```
pub fn save_training<O: ResumableOptimizer + ?Sized>(
    path: impl AsRef<Path>,
    params: &ScaledVarMap,
    optimizer: &O,
    training: &TrainingState,
) -> Result<()> {
    let path = path.as_ref();
    let tree = params.to_tree()?;
    let StoredTree {
        mut tensors,
        mut metadata,
    } = stored(path, &tree, ScaleStorage::F32)?;
    if let Some(name) = tensors.keys().find(|name| is_optimizers(name)) {
        return Err(FilesError::NameClash {
            tensor: name.clone(),
        }
        .into());
    }
    let state = optimizer.optimizer_state()?;
    for (name, tensor) in state.tensors() {
        tensors.insert(format!("{OPTIMIZER_PREFIX}{name}"), tensor.clone());
    }
    let saved = TrainingEntry::of(training, &state);
    let json = serde_json::to_string(&saved).map_err(|error| json_error(path, WHAT, error))?;
    metadata.insert(TRAINING_KEY.to_string(), json);
    Ok(write_safetensors_atomic(path, &tensors, Some(&metadata))?)
}

/// Whether a tensor of a training checkpoint belongs to the optimizer.
fn is_optimizers(name: &str) -> bool {
    name.starts_with(OPTIMIZER_PREFIX)
}

/// The name of the metadata in errors.
const WHAT: &str = "the state of the training";

fn saved(path: &Path, file: &SafetensorsFile) -> Result<TrainingEntry> {
    let Some(text) = file.metadata(TRAINING_KEY) else {
        let reason =
            format!("there is no `{TRAINING_KEY}` entry: not a checkpoint of scaled training");
        return Err(json_error(path, WHAT, reason));
    };
    serde_json::from_str(text).map_err(|error| json_error(path, WHAT, error))
}

/// The training state of a checkpoint of [`save_training`], read without its tensors: tells whether it fits before a model is
/// built.
///
/// # Errors
/// If the file cannot be read; [`FilesError::Json`](crate::FilesError::Json) for one without the state of a training.
pub fn training_state(path: impl AsRef<Path>) -> Result<TrainingState> {
    let path = path.as_ref();
    Ok(saved(path, &SafetensorsFile::open(path)?)?.training)
}

/// Restores a checkpoint of [`save_training`] into parameters and an optimizer that were built like the saved ones, so that
/// training continues bit for bit. Nothing is changed unless the whole checkpoint fits.
///
/// # Errors
/// As [`load`](fp8_scaled::load) and [`ScaledVarMap::load_tree`]; [`FilesError::Json`](crate::FilesError::Json) for a file without the state of a training;
/// [`Error::Optim`](crate::Error::Optim) for the state of another optimizer, and what does not fit in it.
pub fn resume_training<O: ResumableOptimizer + ?Sized>(
    path: impl AsRef<Path>,
    params: &ScaledVarMap,
    optimizer: &mut O,
) -> Result<TrainingState> {
    let path = path.as_ref();
    let file = SafetensorsFile::open(path)?;
    let saved = saved(path, &file)?;
    let tree = take(&file, params.device(), |name| !is_optimizers(name))?;
    params.check_tree(&tree)?;
    let tensors = file.names().filter_map(|name| {
        let own = name.strip_prefix(OPTIMIZER_PREFIX)?.to_string();
        Some(file.tensor(&name, &Device::Cpu).map(|tensor| (own, tensor)))
    });
    let tensors: Vec<(String, Tensor)> = tensors.collect::<Result<_, FilesError>>()?;
    let (state, training) = saved.into_states()?;
    warn_of_lost_scaler(path, &state, optimizer);
    optimizer.load_optimizer_state(&state.with_tensors(tensors))?;
    params.load_tree(&tree)?;
    crate::autocast::take_dropped();
    Ok(training)
}
