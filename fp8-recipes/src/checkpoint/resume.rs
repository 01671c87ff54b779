//! Resuming from a training checkpoint.

use super::fp8::{self, StoredState};
use super::meta::{
    OPTIMIZER, OPTIMIZER_KEY, OptimizerMeta, TrainingMeta, entry, meta_of, mismatch, recipe_text,
};
use super::options::{Restored, ResumeOptions, ResumeReport};
use super::prepared::{PreparedLayer, prepared_layers};
use super::save::variables;
use crate::config::Recipe;
use crate::error::Result;
use crate::module::Fp8Module;
use crate::nn::scaled_parameter::refuse_scaled_model;
use crate::optim::{AdamWConfig, OptimizerState, ResumableOptimizer, Rule};
use crate::warning::warn_of_lost_scaler;
use candle_core::{Device, Tensor};
use candle_nn::VarMap;
use fp8_candle::weight_version::WeightVersion;
use fp8_files::SafetensorsFile;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::PoisonError;

/// Restores a checkpoint into a model that was built and prepared like the saved one, so that the run continues bit for bit. Nothing
/// is changed unless the whole checkpoint fits. [`resume_training_with`] continues with another recipe or optimizer.
///
/// # Errors
/// If the recipe differs from `recipe`, the checkpoint is that of another kind of optimizer, or a variable, an FP8 state or a
/// tensor of the optimizer is missing, left over, or of another shape or dtype, or holds an invalid number (a scale of 0, a NaN
/// in a history). The message names it. [`Error::ScaledParameter`](crate::Error::ScaledParameter) for a model with scaled
/// parameters.
pub fn resume_training<M: Fp8Module + ?Sized, O: ResumableOptimizer + ?Sized>(
    path: impl AsRef<Path>,
    model: &M,
    vars: &VarMap,
    optimizer: &mut O,
    recipe: Option<&Recipe>,
) -> Result<TrainingMeta> {
    let options = ResumeOptions::default();
    let report = resume_training_with(path, model, vars, optimizer, recipe, &options)?;
    Ok(report.meta)
}

/// Like [`resume_training`], with the differences that `options` allow: an f32 run continues in FP8, an FP8 run in f32 or with another
/// recipe, and any run with another optimizer. The report says what was restored and what starts fresh.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::checkpoint::{
///     Restored, ResumeOptions, TrainingMeta, resume_training_with, save_training,
/// };
/// use fp8::optim::{AdamW, AdamWConfig};
/// use fp8::{Recipe, nn, prepare_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("f32.safetensors");
/// // A run in f32 ..
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let model = nn::linear(16, 8, vb.pp("fc"))?;
/// let mut optimizer = AdamW::from_varmap(&vars, AdamWConfig::default())?;
/// # let meta = TrainingMeta {
/// #     step: 100, recipe: None, random: Default::default(), extra: Default::default(),
/// # };
/// save_training(&path, &model, &vars, &optimizer, &meta)?;
///
/// // .. continues in FP8.
/// let recipe: Recipe = "delayed".parse()?;
/// prepare_fp8(&model, &Default::default())?;
/// let options = ResumeOptions::new().allow_recipe_change(true);
/// let report =
///     resume_training_with(&path, &model, &vars, &mut optimizer, Some(&recipe), &options)?;
/// println!("{report}");
/// assert_eq!(report.meta.step, 100);
/// assert_eq!(report.optimizer, Restored::FromCheckpoint);
/// assert_eq!(report.fp8_state, Restored::Fresh);
/// # Ok(()) }
/// ```
///
/// # Errors
/// As [`resume_training`], for everything that `options` do not allow.
pub fn resume_training_with<M: Fp8Module + ?Sized, O: ResumableOptimizer + ?Sized>(
    path: impl AsRef<Path>,
    model: &M,
    vars: &VarMap,
    optimizer: &mut O,
    recipe: Option<&Recipe>,
    options: &ResumeOptions,
) -> Result<ResumeReport> {
    refuse_scaled_model(
        model,
        "checkpoint::resume_training",
        "call scaled::resume_training",
    )?;
    let path = path.as_ref();
    let file = SafetensorsFile::open(path)?;
    let meta = meta_of(&file)?;
    let other_recipe = meta.recipe.as_ref() != recipe;
    if other_recipe && !options.allow_recipe_change {
        return Err(mismatch(
            path,
            "the recipe",
            recipe_text(meta.recipe.as_ref()),
            recipe_text(recipe),
        ));
    }
    let mut stored: BTreeMap<String, Tensor> = BTreeMap::new();
    let mut optimizer_tensors = vec![];
    for name in file.names() {
        match name.strip_prefix(OPTIMIZER) {
            None => {
                let tensor = file.tensor(&name, &Device::Cpu)?;
                stored.insert(name, tensor);
            }
            Some(_) if options.fresh_optimizer => {}
            Some(own) => {
                optimizer_tensors.push((own.to_string(), file.tensor(&name, &Device::Cpu)?));
            }
        }
    }
    let layers = prepared_layers(model);
    let state = fp8::take(path, &mut stored, fp8::rows_of(&file)?)?;
    // Scales of another rule would otherwise stay in use for a step or more.
    let other_layer_recipe = state.other_recipe(path, &layers);
    let other_recipe = other_recipe || other_layer_recipe.is_some();
    if let (Some(error), false) = (other_layer_recipe, options.allow_recipe_change) {
        return Err(error);
    }
    let (fp8_state, state) = match other_recipe || options.fresh_fp8_state {
        true => (Restored::Fresh, StoredState::fresh(&layers)?),
        false => {
            state.check(path, &layers)?;
            (Restored::FromCheckpoint, state)
        }
    };
    let here = variables(vars);
    check_same(path, &here, &stored)?;

    if !options.fresh_optimizer {
        let mut state = optimizer_state(&file)?.with_tensors(optimizer_tensors);
        if options.keep_hyperparameters {
            state = state.with_hyperparameters(Value::Null)?;
        }
        warn_of_lost_scaler(path, &state, optimizer);
        optimizer.load_optimizer_state(&state)?;
    }
    {
        let vars = vars.data().lock().unwrap_or_else(PoisonError::into_inner);
        for (name, var) in vars.iter() {
            var.set(&stored[name].to_device(var.device())?)?;
        }
    }
    announce(&layers, optimizer.announces_changes());
    state.restore(&layers)?;
    Ok(ResumeReport {
        path: path.to_path_buf(),
        recipe: recipe.cloned(),
        variables: here.into_keys().collect(),
        fp8_state,
        fp8_layers: layers.len(),
        optimizer: match options.fresh_optimizer {
            true => Restored::Fresh,
            false => Restored::FromCheckpoint,
        },
        meta,
    })
}

/// Announces that the weights have changed, if their changes are announced.
pub(super) fn announce(layers: &[PreparedLayer], announces_changes: bool) {
    for weight in layers.iter().filter_map(|layer| layer.weight.as_ref()) {
        let version = WeightVersion::of(weight);
        // The first announcement promises that all later changes will be announced too.
        if announces_changes || version.get() > 0 {
            version.announce_change();
        }
    }
}

/// The optimizer's state without its tensors.
pub(super) fn optimizer_state(file: &SafetensorsFile) -> Result<OptimizerState> {
    match entry::<OptimizerMeta>(file, OPTIMIZER_KEY, "the optimizer")? {
        Some(meta) => meta.into_state(),
        // A file from before optimizers of other libraries could be saved.
        None => Ok(OptimizerState::new(AdamWConfig::KIND)),
    }
}

/// The same names, shapes and dtypes on both sides.
pub(super) fn check_same(
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
