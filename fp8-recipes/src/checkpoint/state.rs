//! Weights and FP8 state of a model in one file, without an optimizer and without a VarMap.

use super::fp8::{self, rows_of};
use super::meta::{OPTIMIZER, ROWS_KEY, json, mismatch};
use super::prepared::{prepared_layers, settled_layers};
use super::resume::{announce, check_same};
use crate::FilesError;
use crate::atomic::write_safetensors_atomic;
use crate::error::{Error, LayerError, Result};
use crate::module::{Fp8Layer, Fp8Module, Visitor, show_layer};
use crate::nn::scaled_parameter::refuse_scaled_model;
use candle_core::{Device, Tensor, Var};
use fp8_files::SafetensorsFile;
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// Saves the parameters of `model` under their paths, and the FP8 state of its prepared layers: scales, histories, calibrations.
/// [`load_fp8_state`] restores them into another model, which then evaluates to the same bits under the same recipe.
///
/// The file is plain safetensors, from which candle can build the model as well; the state is in tensors `fp8/..` and in the metadata,
/// as in a training checkpoint. Ends the step first, also in the middle of it: there it warns, once, as
/// [`save_training`](super::save_training) does with an optimizer that announces nothing. Written atomically.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_recipes::checkpoint::{load_fp8_state, save_fp8_state};
/// use fp8_recipes::config::{DelayedFormat, DelayedScaling};
/// use fp8_recipes::{Autocast, nn, prepare_fp8, with_fp8};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("model.safetensors");
/// let fresh = || -> Result<_, Box<dyn std::error::Error>> {
///     let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
///     let model = nn::linear(16, 8, vb.pp("fc"))?;
///     prepare_fp8(&model, &Default::default())?;
///     Ok(model)
/// };
/// let recipe = DelayedScaling::ipex().with_format(DelayedFormat::E5m2);
/// let x = Tensor::randn(0f32, 1., (4, 16), &Device::Cpu)?;
/// let model = fresh()?;
/// with_fp8(Autocast::new(recipe.clone()).calibrating(true), || model.forward(&x))?;
/// save_fp8_state(&path, &model)?;
///
/// let loaded = fresh()?;
/// load_fp8_state(&path, &loaded)?;
/// let logits = |model: &nn::Linear| {
///     with_fp8(Autocast::new(recipe.clone()).training(false), || model.forward(&x))?.to_vec2::<f32>()
/// };
/// assert_eq!(logits(&loaded)?, logits(&model)?);
/// # Ok(()) }
/// ```
///
/// # Errors
/// If a parameter has no path ([`LayerError::Unnamed`]), two have one, a layer holds FP8 codes already ([`FilesError::NotExportable`](crate::FilesError::NotExportable): its
/// file is the one it was loaded from), or the file cannot be written; an old file survives. [`Error::ScaledParameter`] for a
/// model with scaled parameters.
pub fn save_fp8_state<M: Fp8Module + ?Sized>(path: impl AsRef<Path>, model: &M) -> Result<()> {
    let path = path.as_ref();
    refuse_scaled_model(
        model,
        "checkpoint::save_fp8_state",
        "call scaled::save_training",
    )?;
    // Without an optimizer nothing is known of its step.
    let layers = settled_layers(model, false)?;
    let mut tensors = ModelTensors::of(model)?;
    for tensor in tensors.values_mut() {
        *tensor = tensor.detach();
    }
    let (state, rows) = fp8::save(&layers)?;
    for (name, tensor) in state {
        if tensors.insert(name.clone(), tensor).is_some() {
            return Err(FilesError::NameClash { tensor: name }.into());
        }
    }
    let metadata = HashMap::from([(ROWS_KEY.to_string(), json(path, "the FP8 state", &rows)?)]);
    Ok(write_safetensors_atomic(path, &tensors, Some(&metadata))?)
}

/// Restores the weights and the FP8 state of a file of [`save_fp8_state`] into `model`, which is prepared like the saved one. A training
/// checkpoint is accepted as well; its optimizer is ignored.
///
/// A parameter that is a variable takes its value from the file. One that is not a variable, because the model was built from a file,
/// cannot change, so it must already have that value.
///
/// # Errors
/// If the file cannot be read, or a parameter or row of state is missing, left over, of another shape, dtype or recipe, or a fixed
/// parameter of another value: [`crate::TrainingCheckpointError::Mismatch`] names it. Nothing is changed then.
pub fn load_fp8_state<M: Fp8Module + ?Sized>(path: impl AsRef<Path>, model: &M) -> Result<()> {
    let path = path.as_ref();
    refuse_scaled_model(
        model,
        "checkpoint::load_fp8_state",
        "call scaled::resume_training",
    )?;
    let file = SafetensorsFile::open(path)?;
    let mut stored = BTreeMap::new();
    for name in file.names().filter(|name| !name.starts_with(OPTIMIZER)) {
        let tensor = file.tensor(&name, &Device::Cpu)?;
        stored.insert(name, tensor);
    }
    let layers = prepared_layers(model);
    let state = fp8::take(path, &mut stored, rows_of(&file)?)?;
    if let Some(error) = state.other_recipe(path, &layers) {
        return Err(error);
    }
    state.check(path, &layers)?;
    let here = ModelTensors::of(model)?;
    check_same(path, &here, &stored)?;
    let mut changed = vec![];
    for (name, tensor) in &here {
        let value = stored[name].to_device(tensor.device())?;
        if tensor.is_variable() {
            changed.push((Var::from_tensor(tensor)?, value));
        } else if !same_bits(tensor, &value)? {
            return Err(mismatch(
                path,
                &format!("tensor `{name}`"),
                "other values".into(),
                "the values in the model, where it is not a variable".into(),
            ));
        }
    }
    for (var, value) in changed {
        var.set(&value)?;
    }
    announce(&layers, false);
    state.restore(&layers)
}

/// Whether two tensors of one shape, dtype and device hold the same values.
fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(fp8_candle::fingerprint(&a.detach().contiguous()?)?
        == fp8_candle::fingerprint(&b.contiguous()?)?)
}

/// The named tensors of a model.
#[derive(Default)]
struct ModelTensors {
    tensors: BTreeMap<String, Tensor>,
    error: Option<Error>,
}

impl ModelTensors {
    fn of<M: Fp8Module + ?Sized>(model: &M) -> Result<BTreeMap<String, Tensor>> {
        let mut all = Self::default();
        model.visit(&mut all);
        match all.error {
            Some(error) => Err(error),
            None => Ok(all.tensors),
        }
    }

    fn keep(&mut self, path: Option<&str>, tensor: &Tensor) -> Result<()> {
        let Some(path) = path else {
            // Tensors such as masks and tables of sines are not parameters.
            return match tensor.is_variable() {
                false => Ok(()),
                true => Err(LayerError::Unnamed {
                    shape: tensor.dims().to_vec(),
                }
                .into()),
            };
        };
        match self.tensors.insert(path.to_string(), tensor.clone()) {
            Some(other) if other.id() != tensor.id() => Err(FilesError::NameClash {
                tensor: path.to_string(),
            }
            .into()),
            _ => Ok(()),
        }
    }
}

impl Visitor for ModelTensors {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        if layer.static_weight().is_some() {
            let reason = "its weight is FP8 codes, whose file is the one it was loaded from";
            self.error.get_or_insert(
                FilesError::NotExportable {
                    path: layer.path().unwrap_or("(no path)").to_string(),
                    reason: reason.into(),
                }
                .into(),
            );
            return;
        }
        show_layer(self, layer);
    }

    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        if let Err(error) = self.keep(path, tensor) {
            self.error.get_or_insert(error);
        }
    }
}
