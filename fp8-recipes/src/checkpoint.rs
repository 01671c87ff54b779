//! Training checkpoints: everything a run needs to go on bit-exactly, in one safetensors file.
//!
//! | tensors | names |
//! |---|---|
//! | variables | their names in the VarMap |
//! | FP8 state, f32 | `{path}.{input,weight,grad_output}.{quant_scale,amax_history}` |
//! | delayed scaling, weights that the last steps did not change | `{path}.weight.kept_quant_scale`, f32 `[1]` |
//! | optimizer | `optimizer/` + the optimizer's own names |
//!
//! Recipe, step, random state and the caller's own values are JSON in the metadata. Save after an optimizer step:
//! amaxes of a backward pass that is not finished are not part of a checkpoint.

use crate::atomic::write_safetensors_atomic;
use crate::autocast::end_step;
use crate::config::Recipe;
use crate::error::{Error, Result};
use crate::module::{Fp8Module, Visitor};
use crate::nn::Linear;
use crate::optim::AdamW;
use crate::safetensors_file::SafetensorsFile;
use crate::state::Fp8State;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarMap;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, PoisonError};

const OPTIMIZER: &str = "optimizer/";
const KEY: &str = "fp8_training";

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
    let path = path.as_ref();
    let mut tensors: BTreeMap<String, Tensor> = variables(vars);
    let mut state = fp8_state(model)?;
    for (weight, layer) in layers(model) {
        if let Some(scale) = layer.cache.kept_quant_scale(&weight)? {
            state.insert(kept_name(&layer), scale);
        }
    }
    let optimizer = optimizer.state()?;
    let optimizer = optimizer
        .into_iter()
        .map(|(name, t)| (format!("{OPTIMIZER}{name}"), t));
    for (name, tensor) in state.into_iter().chain(optimizer) {
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(Error::NameClash { tensor: name });
        }
    }
    let json = serde_json::to_string(meta).map_err(|error| Error::Json {
        path: path.to_path_buf(),
        what: "the training metadata",
        reason: error.to_string(),
    })?;
    let metadata = HashMap::from([(KEY.to_string(), json)]);
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

/// Puts a checkpoint back into a model built and prepared as the saved one was. Nothing is changed unless the whole
/// checkpoint fits.
///
/// # Errors
/// If the recipe differs from `recipe`, or a variable, an FP8 state or an optimizer moment is missing, left over, or
/// of another shape or dtype. The message names it.
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
    let mut kept_scales = vec![];
    for (weight, layer) in layers(model) {
        let name = kept_name(&layer);
        let scale = stored.remove(&name);
        if let Some(scale) = scale
            .as_ref()
            .filter(|t| t.dtype() != DType::F32 || t.dims() != [1])
        {
            let what = format!("tensor `{name}`");
            return Err(mismatch(
                path,
                &what,
                describe(Some(scale)),
                "f32 [1]".into(),
            ));
        }
        kept_scales.push((weight, layer, scale));
    }

    let expected: BTreeMap<String, Tensor> = variables(vars)
        .into_iter()
        .chain(fp8_state(model)?)
        .collect();
    check_same(path, &expected, &stored)?;

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
    for state in states(model) {
        for (role, slot) in state.slots() {
            let prefix = format!("{}.{role}", state.path());
            slot.restore(
                &stored[&format!("{prefix}.quant_scale")],
                &stored[&format!("{prefix}.amax_history")],
            )?;
        }
    }
    for (weight, layer, scale) in kept_scales {
        match scale {
            Some(scale) => layer
                .cache
                .restore(&weight, scale.to_device(weight.device())?)?,
            None => layer.cache.clear(),
        }
    }
    Ok(meta)
}

/// The same names, shapes and dtypes on both sides. Histories may differ in length: the recipe decides it.
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
                let history = name.ends_with(".amax_history") && there.rank() == 1;
                here.dtype() == there.dtype() && (history || here.dims() == there.dims())
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

/// The FP8 state of every prepared layer as named f32 tensors:
/// `{path}.{input,weight,grad_output}.{quant_scale,amax_history}`.
///
/// # Errors
/// If two layers with different state have one path.
pub fn fp8_state<M: Fp8Module + ?Sized>(model: &M) -> Result<BTreeMap<String, Tensor>> {
    let mut tensors = BTreeMap::new();
    for state in states(model) {
        for (role, slot) in state.slots() {
            let slot = slot.tensors();
            let prefix = format!("{}.{role}", state.path());
            for (name, tensor) in [
                ("quant_scale", slot.quant_scale),
                ("amax_history", slot.amax_history),
            ] {
                let name = format!("{prefix}.{name}");
                if tensors.insert(name.clone(), tensor).is_some() {
                    return Err(Error::NameClash { tensor: name });
                }
            }
        }
    }
    Ok(tensors)
}

/// Name of the scale that an unchanged weight keeps.
fn kept_name(state: &Fp8State) -> String {
    format!("{}.weight.kept_quant_scale", state.path())
}

/// The FP8 state of each prepared layer, shared state once.
fn states<M: Fp8Module + ?Sized>(model: &M) -> impl Iterator<Item = Arc<Fp8State>> {
    layers(model).into_iter().map(|(_, state)| state)
}

/// Weight and FP8 state of each prepared layer, shared state once.
fn layers<M: Fp8Module + ?Sized>(model: &M) -> Vec<(Tensor, Arc<Fp8State>)> {
    #[derive(Default)]
    struct Layers(Vec<(Tensor, Arc<Fp8State>)>);
    impl Visitor for Layers {
        fn linear(&mut self, linear: &Linear) {
            if let Some(state) = linear.fp8_state()
                && !self.0.iter().any(|(_, other)| Arc::ptr_eq(other, state))
            {
                self.0.push((linear.weight().clone(), state.clone()));
            }
        }

        fn tensor(&mut self, _: &str, _: &Tensor) {}
    }
    let mut all = Layers::default();
    model.visit(&mut all);
    all.0
}

/// How many tensors the model's layers have cast to FP8 so far, forward and backward.
pub fn quantized_tensors<M: Fp8Module + ?Sized>(model: &M) -> u64 {
    states(model).map(|state| state.quantized_tensors()).sum()
}
