//! Training checkpoints: everything a run needs to go on bit-exactly, in one safetensors file.
//!
//! | tensors | names |
//! |---|---|
//! | variables | their names in the VarMap |
//! | FP8 state | `fp8/` + the columns of the model's table: quant_scale, dequant_scale, amax_history, calibrated_amax, kept_quant_scale, non_finite |
//! | optimizer | `optimizer/` + the optimizer's own names |
//!
//! Recipe, step, random state, the names of the table's rows and the caller's own values are JSON in the metadata. Save after
//! an optimizer step: amaxes of a backward pass that is not finished are not part of a checkpoint.

mod fp8;

pub use fp8::Fp8Rows;

use crate::atomic::write_safetensors_atomic;
use crate::autocast::end_step;
use crate::config::Recipe;
use crate::error::{Error, Result};
use crate::module::{Fp8Layer, Fp8Module, Visitor};
use crate::optim::AdamW;
use crate::safetensors_file::SafetensorsFile;
use crate::state::Fp8State;
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use fp8_candle::weight_version::announce_change;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, PoisonError};

const OPTIMIZER: &str = "optimizer/";
/// Before the names of the FP8 state's columns.
const PREFIX: &str = "fp8/";
const KEY: &str = "fp8_training";
/// Metadata of the FP8 state's rows.
const ROWS_KEY: &str = "fp8_state";

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

/// Saves variables, optimizer and FP8 state, atomically: a crash leaves the old file or the new one.
///
/// Ends the step first (see [`crate::end_step`]), which does not change what later steps compute.
///
/// # Errors
/// If a tensor cannot be read or the file not written; the old file survives.
pub fn save_training<M: Fp8Module + ?Sized>(
    path: impl AsRef<Path>,
    model: &M,
    vars: &VarMap,
    optimizer: &AdamW,
    meta: &TrainingMeta,
) -> Result<()> {
    end_step()?;
    let layers = layers(model);
    for layer in &layers {
        // The guards of the last step may have been another thread's.
        layer.state.table().update_gradients()?;
    }
    let path = path.as_ref();
    let mut tensors: BTreeMap<String, Tensor> = variables(vars);
    let (state, rows) = fp8::save(&layers)?;
    let optimizer = optimizer.state()?;
    let optimizer = optimizer
        .into_iter()
        .map(|(name, t)| (format!("{OPTIMIZER}{name}"), t));
    for (name, tensor) in state.into_iter().chain(optimizer) {
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(Error::NameClash { tensor: name });
        }
    }
    let json = |what: &'static str, text: serde_json::Result<String>| {
        text.map_err(|error| Error::Json {
            path: path.to_path_buf(),
            what,
            reason: error.to_string(),
        })
    };
    let metadata = HashMap::from([
        (
            KEY.to_string(),
            json("the training metadata", serde_json::to_string(meta))?,
        ),
        (
            ROWS_KEY.to_string(),
            json("the FP8 state", serde_json::to_string(&rows))?,
        ),
    ]);
    Ok(write_safetensors_atomic(path, &tensors, Some(&metadata))?)
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

fn rows_of(file: &SafetensorsFile) -> Result<fp8::Meta> {
    let Some(json) = file.metadata(ROWS_KEY) else {
        return Ok(fp8::Meta::default());
    };
    serde_json::from_str(json).map_err(|error| Error::Json {
        path: file.path().to_path_buf(),
        what: "the FP8 state",
        reason: error.to_string(),
    })
}

/// Puts a checkpoint back into a model built and prepared as the saved one was. Nothing is changed unless the whole
/// checkpoint fits.
///
/// # Errors
/// If the recipe differs from `recipe`, or a variable, an FP8 state or an optimizer moment is missing, left over, or
/// of another shape or dtype, or holds a number that it cannot hold (a scale of 0, a history with NaN). The message
/// names it.
pub fn resume_training<M: Fp8Module + ?Sized>(
    path: impl AsRef<Path>,
    model: &M,
    vars: &VarMap,
    optimizer: &mut AdamW,
    recipe: Option<&Recipe>,
) -> Result<TrainingMeta> {
    let path = path.as_ref();
    let file = SafetensorsFile::open(path)?;
    let meta = meta_of(&file)?;
    if meta.recipe.as_ref() != recipe {
        return Err(mismatch(
            path,
            "the recipe",
            recipe_text(meta.recipe.as_ref()),
            recipe_text(recipe),
        ));
    }
    let mut stored: BTreeMap<String, Tensor> = BTreeMap::new();
    for name in file.names() {
        let tensor = file.tensor(&name, &Device::Cpu)?;
        stored.insert(name, tensor);
    }
    let (optimizer_state, mut stored): (BTreeMap<_, _>, BTreeMap<_, _>) = stored
        .into_iter()
        .partition(|(name, _)| name.starts_with(OPTIMIZER));
    let layers = layers(model);
    let state = fp8::take(path, &mut stored, rows_of(&file)?)?;
    state.check(path, &layers)?;
    check_same(path, &variables(vars), &stored)?;

    let optimizer_state: HashMap<String, Tensor> = optimizer_state
        .into_iter()
        .map(|(name, tensor)| (name[OPTIMIZER.len()..].to_string(), tensor))
        .collect();
    optimizer.load_state(&optimizer_state)?;
    {
        let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        for (name, var) in vars.iter() {
            var.set(&stored[name].to_device(var.device())?)?;
        }
    }
    for weight in layers.iter().map(|layer| &layer.weight) {
        announce_change(weight);
    }
    state.restore(&layers)?;
    Ok(meta)
}

/// The same names, shapes and dtypes on both sides.
fn check_same(
    path: &Path,
    expected: &BTreeMap<String, Tensor>,
    stored: &BTreeMap<String, Tensor>,
) -> Result<()> {
    let names: BTreeSet<&String> = expected.keys().chain(stored.keys()).collect();
    for name in names {
        let (here, there) = (expected.get(name), stored.get(name));
        let fits = match (here, there) {
            (Some(here), Some(there)) => {
                here.dtype() == there.dtype() && here.dims() == there.dims()
            }
            _ => false,
        };
        if !fits {
            return Err(mismatch(
                path,
                &format!("tensor `{name}`"),
                describe(there),
                describe(here),
            ));
        }
    }
    Ok(())
}

fn describe(tensor: Option<&Tensor>) -> String {
    match tensor {
        None => "missing".to_string(),
        Some(tensor) => format!("{} {:?}", tensor.dtype().as_str(), tensor.dims()),
    }
}

fn mismatch(path: &Path, what: &str, found: String, expected: String) -> Error {
    Error::ResumeMismatch {
        path: path.to_path_buf(),
        what: what.to_string(),
        found,
        expected,
    }
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

/// A prepared layer.
struct Layer {
    weight: Tensor,
    state: Arc<Fp8State>,
}

/// Each prepared layer, those that share their state once.
fn layers<M: Fp8Module + ?Sized>(model: &M) -> Vec<Layer> {
    #[derive(Default)]
    struct Layers(Vec<Layer>);
    impl Visitor for Layers {
        fn layer(&mut self, layer: &dyn Fp8Layer) {
            if let Some(state) = layer.fp8_state()
                && !self.0.iter().any(|other| Arc::ptr_eq(&other.state, &state))
            {
                self.0.push(Layer {
                    weight: layer.held_weight().clone(),
                    state,
                });
            }
        }

        fn tensor(&mut self, _: Option<&str>, _: &Tensor) {}
    }
    let mut all = Layers::default();
    model.visit(&mut all);
    all.0
}

/// How many tensors the model's layers have cast to FP8 so far, forward and backward.
pub fn quantized_tensors<M: Fp8Module + ?Sized>(model: &M) -> u64 {
    let layers = layers(model);
    let casts = layers.iter().map(|layer| layer.state.quantized_tensors());
    casts.sum()
}
