//! Models opened from files, with variables as parameters.

use super::error::{Error, Result};
use super::initial::draw;
use super::vars::locked;
use crate::load::{Checkpoint, OpenOptions};
use crate::models::gguf::{GgufFile, GgufSource, is_gguf};
use crate::models::{Config, Error as ModelError, Model, config_of};
use crate::rewrite::Source;
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Device, Tensor, TensorId, Var};
use candle_nn::{VarBuilder, VarMap};
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// A model opened from a file, with all of its parameters as variables; FP8 weights are dequantized.
pub struct TrainableModel {
    /// The model.
    pub model: Model,
    /// Its parameters, under their names in the file.
    pub vars: VarMap,
    /// The file.
    pub source: Box<dyn Source>,
}

impl TrainableModel {
    /// Opens the model in a directory, in FP8 of any family or in high precision, or in a GGUF file, with parameters in `dtype`.
    ///
    /// ```no_run
    /// use candle_core::{DType, Device};
    /// use fp8::training::TrainableModel;
    /// let base = TrainableModel::open("SmolLM2-135M", DType::F32, &Device::Cpu)?;
    /// println!("{} parameters", base.vars.all_vars().iter().map(|var| var.elem_count()).sum::<usize>());
    /// # Ok::<(), fp8::training::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`models::open`](crate::models::open()).
    pub fn open(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        let (source, config) = open_source(path.as_ref())?;
        Self::of(source, &config, dtype, device)
    }

    /// [`TrainableModel::open`] for an encoder that will predict these classes. If the file has a classifier of the same classes, training
    /// continues from it; otherwise the classifier is new, drawn by `seed`, and so is the pooler if the file has none.
    ///
    /// # Errors
    /// As [`models::open`](crate::models::open()), and [`Error::Objective`] for a language model.
    pub fn open_classifier(
        path: impl AsRef<Path>,
        labels: &[String],
        seed: u64,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let (source, config) = open_source(path.as_ref())?;
        let Config::Bert(mut config) = config else {
            return Err(Error::Objective {
                objective: "classify texts",
                expected: "an encoder",
            });
        };
        let keeps = config.labels == labels;
        config.labels = labels.to_vec();
        let is_new = |name: &str| is_classifier(name) && !keeps;
        let may_miss = |name: &str| is_classifier(name) || is_pooler(name);
        let config = Config::Bert(config);
        let (made, missing) = Self::build(source, &config, (dtype, device), is_new, may_miss)?;
        draw(&made.vars, seed, |name| missing.contains(name))?;
        Ok(made)
    }

    /// The same model without the classifier that its file may have: its features alone are trained, and the file's classifier keeps its
    /// values.
    ///
    /// # Errors
    /// If the lock of the variables is poisoned.
    pub fn without_classifier(mut self) -> Result<Self> {
        if let Model::Bert(bert) = &mut self.model {
            bert.remove_classifier();
            let used = used_tensors(&self.model);
            locked(&self.vars)?.retain(|_, var| used.contains(&var.as_tensor().id()));
        }
        Ok(self)
    }

    /// Makes the model from the tensors of `source`.
    ///
    /// # Errors
    /// If a tensor is missing, cannot be read or has another shape.
    pub fn of(
        source: Box<dyn Source>,
        config: &Config,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let target = (dtype, device);
        Ok(Self::build(source, config, target, |_| false, |_| false)?.0)
    }

    /// Makes the model without the tensors of the source that `is_new` names. Also gives the parameters that the source does not have,
    /// which `may_miss` has to allow.
    fn build(
        source: Box<dyn Source>,
        config: &Config,
        (dtype, device): (DType, &Device),
        is_new: impl Fn(&str) -> bool,
        may_miss: impl Fn(&str) -> bool,
    ) -> Result<(Self, HashSet<String>)> {
        // The correction of a router's choice is not learned by gradients, and models read it in f32.
        let learns = |name: &str| !name.ends_with("e_score_correction_bias");
        let vars = VarMap::new();
        let mut values = BTreeMap::new();
        for name in source.names() {
            let is_float = source.raw_dtype(&name).is_none()
                && source.dtype(&name).is_none_or(|dtype| dtype.is_float());
            if is_float && !is_new(&name) {
                let dtype = if learns(&name) { dtype } else { DType::F32 };
                let value = source.value(&name, dtype)?.to_device(device)?;
                values.insert(name, Var::from_tensor(&value)?);
            }
        }
        for (name, stored) in source.tied() {
            if let Some(var) = values.get(&stored).cloned() {
                values.insert(name, var);
            }
        }
        let all = values.clone();
        locked(&vars)?.extend(values);
        let model = Model::new(config, VarBuilder::from_varmap(&vars, dtype, device))?;
        let used = used_tensors(&model);
        let mut kept = locked(&vars)?;
        // A parameter that the model asks for but the file lacks would begin with random numbers.
        let missing = kept.keys().filter(|name| !all.contains_key(*name));
        let missing: HashSet<String> = missing.cloned().collect();
        if let Some(name) = missing.iter().find(|name| !may_miss(name)) {
            let (tensor, place) = (name.clone(), "the model's file".into());
            return Err(crate::FilesError::MissingTensor { tensor, place }.into());
        }
        kept.retain(|name, var| learns(name) && used.contains(&var.as_tensor().id()));
        drop(kept);
        let made = Self {
            model,
            vars,
            source,
        };
        Ok((made, missing))
    }
}

fn is_classifier(name: &str) -> bool {
    name.starts_with("classifier.")
}

fn is_pooler(name: &str) -> bool {
    name.contains("pooler.dense.")
}

impl std::fmt::Debug for TrainableModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TrainableModel")
            .field("model", &self.model)
            .finish_non_exhaustive()
    }
}

/// The file at `path` with the model's configuration.
fn open_source(path: &Path) -> Result<(Box<dyn Source>, Config)> {
    if is_gguf(path) {
        let file = GgufFile::open(path).map_err(ModelError::from)?;
        let source = GgufSource::new(file).map_err(ModelError::from)?;
        let config = Config::parse(path, source.config().unwrap_or(&Value::Null))?;
        return Ok((Box::new(source), config));
    }
    let checkpoint = Checkpoint::open_dir_with(path, &OpenOptions::default())?;
    let config = config_of(&checkpoint, path)?;
    Ok((Box::new(checkpoint), config))
}

/// The tensors that a model shows.
fn used_tensors(model: &Model) -> HashSet<TensorId> {
    struct Ids(HashSet<TensorId>);
    impl Visitor for Ids {
        fn layer(&mut self, layer: &dyn crate::Fp8Layer) {
            self.0.insert(layer.held_weight().id());
            self.0.extend(layer.bias().map(Tensor::id));
        }
        fn tensor(&mut self, _: Option<&str>, tensor: &Tensor) {
            self.0.insert(tensor.id());
        }
    }
    let mut ids = Ids(HashSet::new());
    model.visit(&mut ids);
    ids.0
}
