//! Training checkpoints: everything a run needs to go on bit-exactly, in one safetensors file.
//!
//! | tensors | names |
//! |---|---|
//! | variables | their names in the VarMap |
//! | FP8 state | `fp8/` + the columns of the model's table: quant_scale, dequant_scale, amax_history, calibrated_amax, kept_quant_scale, non_finite |
//! | optimizer | `optimizer/` + the optimizer's own names |
//!
//! Recipe, step, random state, the names of the table's rows, the optimizer's name and hyperparameters, and the caller's own
//! values are JSON in the metadata,
//! the state of a loss scaler too ([`LossScaled`](crate::optim::LossScaled)). Save after an optimizer step: amaxes of a backward pass that is not finished are not part of
//! a checkpoint.
//!
//! ```
//! # use fp8_recipes as fp8;
//! use candle_core::{DType, Device, Module, Tensor};
//! use candle_nn::{VarBuilder, VarMap};
//! use fp8::checkpoint::{TrainingMeta, resume_training, save_training};
//! use fp8::optim::{AdamW, AdamWConfig};
//! use fp8::{PrepareOptions, Recipe, nn, prepare_fp8, with_fp8};
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let path = dir.path().join("run.safetensors");
//! let recipe: Recipe = "delayed".parse()?;
//! let make = || -> Result<_, Box<dyn std::error::Error>> {
//!     let vars = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
//!     let model = nn::linear(16, 8, vb.pp("fc"))?;
//!     prepare_fp8(&model, &PrepareOptions::default())?;
//!     let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default())?;
//!     Ok((vars, model, optimizer))
//! };
//! let (vars, model, mut optimizer) = make()?;
//! let x = Tensor::ones((4, 16), DType::F32, &Device::Cpu)?;
//! let loss = with_fp8(recipe.clone(), || model.forward(&x))?.sqr()?.mean_all()?;
//! optimizer.apply(&loss.backward()?)?;
//! let meta = TrainingMeta {
//!     step: 1,
//!     recipe: Some(recipe.clone()),
//!     random: serde_json::json!({ "seed": 17 }),
//!     extra: serde_json::Value::Null,
//! };
//! save_training(&path, &model, &vars, &optimizer, &meta)?;
//!
//! // In the next process:
//! let (vars, model, mut optimizer) = make()?;
//! let meta = resume_training(&path, &model, &vars, &mut optimizer, Some(&recipe))?;
//! assert_eq!((meta.step, optimizer.steps()?), (1, 1));
//! # Ok(()) }
//! ```
//!
//! [`save_fp8_state`] writes the same without an optimizer, for a model that only evaluates or whose optimizer begins anew.
//!
//! Beginnings from other files:
//!
//! | you have | call |
//! |---|---|
//! | a checkpoint of an f32 run, to go on in FP8, or the other way, or with another recipe or optimizer | [`resume_training_with`] |
//! | weights alone (`VarMap::save`, a model from elsewhere), to train in FP8 | [`load::dequantize_into`](crate::load::dequantize_into), then a new optimizer |
//! | an FP8 checkpoint, to train all of its weights | the same, which dequantizes them |
//! | an FP8 checkpoint, to train adapters on top of it | [`load::var_builder`](crate::load::var_builder), and the adapters in a VarMap of their own |

mod fp8;
mod options;
mod resume;
mod state;

pub use fp8::Fp8Rows;
pub use options::{Restored, ResumeOptions, ResumeReport};
pub use resume::{resume_training, resume_training_with};
pub use state::{load_fp8_state, save_fp8_state};

use crate::atomic::write_safetensors_atomic;
use crate::autocast::{Fp8State, end_step};
use crate::config::{Operand, Recipe};
use crate::error::{Error, Result, TrainingCheckpointError};
use crate::module::{Fp8Layer, Fp8Module, Fp8Operator, Visitor};
use crate::optim::{LossScalerState, ResumableOptimizer};
use crate::safetensors_file::SafetensorsFile;
use crate::scaled::refuse_scaled_model;
use candle_core::Tensor;
use candle_nn::VarMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::sync::{Arc, PoisonError};

const OPTIMIZER: &str = "optimizer/";
/// Before the names of the FP8 state's columns.
const PREFIX: &str = "fp8/";
const KEY: &str = "fp8_training";
/// Metadata of the FP8 state's rows.
const ROWS_KEY: &str = "fp8_state";
/// Metadata of the optimizer.
const OPTIMIZER_KEY: &str = "fp8_optimizer";

/// What a checkpoint holds beside tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainingMeta {
    /// Finished optimizer steps.
    pub step: u64,
    /// Recipe of the guard; None for a high-precision run.
    pub recipe: Option<Recipe>,
    /// State of the run's random generator, in the caller's own form.
    pub random: serde_json::Value,
    /// Anything else the caller wants back, for example its configuration.
    pub extra: serde_json::Value,
}

/// What the metadata says of the optimizer.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct OptimizerMeta {
    kind: String,
    hyperparameters: serde_json::Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scaler: Option<LossScalerState>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    global_steps: Option<u64>,
}

/// Saves variables, optimizer and FP8 state, atomically: a crash leaves the old file or the new one.
///
/// `optimizer` is any [`ResumableOptimizer`]: this library's, candle-nn's, your own, or
/// [`NoOptimizer`](crate::optim::NoOptimizer).
///
/// Ends the step first (see [`crate::end_step`]), which does not change what later steps compute.
///
/// # Errors
/// If a tensor cannot be read or the file not written; the old file survives. [`Error::ScaledParameter`] for a model with scaled
/// parameters, which [`scaled::save_training`](crate::scaled::save_training) saves.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::checkpoint::{TrainingMeta, save_training};
/// use fp8::optim::{AdamW, AdamWConfig};
/// use fp8::{PrepareOptions, nn, prepare_fp8};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("run.safetensors");
/// let vars = VarMap::new();
/// let model = nn::linear(16, 8, VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu).pp("fc"))?;
/// prepare_fp8(&model, &PrepareOptions::default())?;
/// let optimizer = AdamW::from_varmap(&vars, AdamWConfig::default())?;
/// let meta = TrainingMeta {
///     step: 0,
///     recipe: Some("delayed".parse()?),
///     random: serde_json::json!({ "seed": 17 }),
///     extra: serde_json::Value::Null,
/// };
/// save_training(&path, &model, &vars, &optimizer, &meta)?;
/// # Ok(()) }
/// ```
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
    let layers = settled_layers(model)?;
    let path = path.as_ref();
    let mut tensors: BTreeMap<String, Tensor> = variables(vars);
    let (state, rows) = fp8::save(&layers)?;
    let optimizer = optimizer.optimizer_state()?;
    let optimizer_meta = OptimizerMeta {
        kind: optimizer.kind().to_string(),
        hyperparameters: optimizer.hyperparameters_json().clone(),
        loss_scaler: optimizer.loss_scaler().copied(),
        global_steps: optimizer.global_steps(),
    };
    let optimizer = optimizer.tensors().iter();
    let optimizer = optimizer.map(|(name, t)| (format!("{OPTIMIZER}{name}"), t.clone()));
    for (name, tensor) in state.into_iter().chain(optimizer) {
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(Error::NameClash { tensor: name });
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

/// The prepared layers of `model`, after its last step has ended.
fn settled_layers<M: Fp8Module + ?Sized>(model: &M) -> Result<Vec<Layer>> {
    end_step()?;
    let layers = layers(model);
    for layer in &layers {
        // The guards of the last step may have been another thread's.
        layer.state.table().update_gradients()?;
    }
    Ok(layers)
}

/// An entry of the metadata.
fn json(path: &Path, what: &'static str, value: &impl Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::Json {
        path: path.to_path_buf(),
        what,
        reason: error.to_string(),
    })
}

/// Reads the metadata of a training checkpoint without its tensors.
///
/// # Errors
/// If the file cannot be read or is no training checkpoint.
pub fn training_meta(path: impl AsRef<Path>) -> Result<TrainingMeta> {
    meta_of(&SafetensorsFile::open(path.as_ref())?)
}

fn meta_of(file: &SafetensorsFile) -> Result<TrainingMeta> {
    let invalid = |reason: String| Error::Json {
        path: file.path().to_path_buf(),
        what: "the training metadata",
        reason,
    };
    let json = file.metadata(KEY).ok_or_else(|| {
        invalid(format!(
            "there is no `{KEY}` entry: not a training checkpoint"
        ))
    })?;
    serde_json::from_str(json).map_err(|error| invalid(error.to_string()))
}

fn mismatch(path: &Path, what: &str, found: String, expected: String) -> Error {
    TrainingCheckpointError::Mismatch {
        path: path.to_path_buf(),
        what: what.to_string(),
        found,
        expected,
    }
    .into()
}

fn recipe_text(recipe: Option<&Recipe>) -> String {
    match recipe {
        None => "none (high precision)".into(),
        Some(recipe) => recipe.to_string(),
    }
}

fn variables(vars: &VarMap) -> BTreeMap<String, Tensor> {
    let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
    vars.iter()
        .map(|(name, var)| (name.clone(), var.as_tensor().detach()))
        .collect()
}

/// The FP8 state of every prepared layer, by name: path of the layer, a dot, the role. Histories may be of any length.
///
/// # Errors
/// If two layers with different state have one path.
pub fn fp8_state<M: Fp8Module + ?Sized>(model: &M) -> Result<Fp8Rows> {
    fp8::rows(&layers(model))
}

/// A prepared layer or operator.
struct Layer {
    /// None for an operator without a GEMM.
    weight: Option<Tensor>,
    state: Arc<Fp8State>,
}

/// Each prepared layer, those that share their state once.
fn layers<M: Fp8Module + ?Sized>(model: &M) -> Vec<Layer> {
    #[derive(Default)]
    struct Layers(Vec<Layer>);
    impl Layers {
        fn note(&mut self, state: Option<Arc<Fp8State>>, weight: Option<&Tensor>) {
            if let Some(state) = state
                && !self.0.iter().any(|other| Arc::ptr_eq(&other.state, &state))
            {
                let weight = weight.cloned();
                self.0.push(Layer { weight, state });
            }
        }
    }
    impl Visitor for Layers {
        fn layer(&mut self, layer: &dyn Fp8Layer) {
            self.note(layer.fp8_state(), Some(layer.held_weight()));
        }

        fn operator(&mut self, operator: &dyn Fp8Operator) {
            self.note(operator.fp8_state(), None);
        }

        fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
    }
    let mut all = Layers::default();
    model.visit(&mut all);
    all.0
}

/// How many tensors of each use the model's layers and operators have cast so far. A copy that serves both uses of an operand
/// counts for the first.
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::{PrepareOptions, RecipeName, checkpoint::cast_counts, config::Operand, nn, prepare_fp8, with_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let x = Tensor::randn(0f32, 1., (4, 32), &Device::Cpu)?;
/// # let layer = nn::Linear::new(Tensor::randn(0f32, 1., (16, 32), &Device::Cpu)?, None).with_path("fc");
/// # prepare_fp8(&layer, &PrepareOptions::default())?;
/// with_fp8(RecipeName::Hybrid, || layer.forward(&x))?;
/// let counts = cast_counts(&layer);
/// assert_eq!(counts[&Operand::Output], 1);
/// assert_eq!(counts[&Operand::GradOutput], 0);
/// # Ok(()) }
/// ```
pub fn cast_counts<M: Fp8Module + ?Sized>(model: &M) -> BTreeMap<Operand, u64> {
    let layers = layers(model);
    let all = Operand::OF_GEMMS.into_iter().chain(Operand::RESULTS);
    let counts = all.map(|operand| {
        let casts = layers.iter().map(|layer| layer.state.casts(operand));
        (operand, casts.sum())
    });
    counts.collect()
}

/// How many tensors the model's layers have cast to FP8 so far, forward and backward.
pub fn quantized_tensors<M: Fp8Module + ?Sized>(model: &M) -> u64 {
    let layers = layers(model);
    let casts = layers.iter().map(|layer| layer.state.quantized_tensors());
    casts.sum()
}
