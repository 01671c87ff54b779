//! Models of files whose parameters are variables, and the files of their trained values.

use super::error::Result;
use crate::fp8_core::philox4x32_10;
use crate::load::{Checkpoint, OpenOptions};
use crate::models::gguf::{GgufFile, GgufSource, is_gguf};
use crate::models::{Config, Error as ModelError, Model, config_of};
use crate::rewrite::Source;
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Device, Tensor, TensorId, Var};
use candle_nn::{VarBuilder, VarMap};
use serde_json::Value;
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

/// A model of a file, with all of its parameters as variables: FP8 weights are dequantized.
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
        let vars = VarMap::new();
        let mut values = BTreeMap::new();
        for name in source.names() {
            let is_float = source.dtype(&name).is_none_or(|dtype| dtype.is_float());
            if is_float {
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
        // A parameter that the model has asked for and the file does not have would begin with random numbers.
        if let Some(name) = kept.keys().find(|name| !all.contains_key(*name)) {
            let (tensor, place) = (name.clone(), "the model's file".into());
            return Err(crate::FilesError::MissingTensor { tensor, place }.into());
        }
        // The correction of a router's choice is not learned by gradients.
        let learns = |name: &String| !name.ends_with("e_score_correction_bias");
        kept.retain(|name, var| learns(name) && used.contains(&var.as_tensor().id()));
        drop(kept);
        Ok(Self {
            model,
            vars,
            source,
        })
    }
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

type Locked<'a> = std::sync::MutexGuard<'a, std::collections::HashMap<String, Var>>;

fn locked(vars: &VarMap) -> Result<Locked<'_>> {
    let poisoned = |_| candle_core::Error::msg("the VarMap's lock is poisoned").into();
    vars.data().lock().map_err(poisoned)
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

/// Draws the matrices of new adapters by a seed, uniformly from +-1 / sqrt(in_features) for each A as PEFT does; each B stays zero. The same seed and names
/// give the same numbers on every machine.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::VarMap;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vars = VarMap::new();
/// vars.get((2, 3), "q_proj.lora_A.weight", candle_nn::init::ZERO, DType::F32, &Device::Cpu)?;
/// fp8::training::initialize_adapter(&vars, 7)?;
/// # assert!(vars.all_vars()[0].abs()?.sum_all()?.to_scalar::<f32>()? > 0.);
/// # Ok(()) }
/// ```
///
/// # Errors
/// If a variable cannot be set.
pub fn initialize_adapter(vars: &VarMap, seed: u64) -> Result<()> {
    let vars = locked(vars)?;
    let mut names: Vec<_> = vars.iter().collect();
    names.sort_by_key(|(name, _)| *name);
    for (number, (_, var)) in (names.iter())
        .filter(|(name, _)| name.ends_with("lora_A.weight"))
        .enumerate()
    {
        let (rank, inputs) = var.dims2()?;
        let bound = 1. / (inputs.max(1) as f32).sqrt();
        let key = [seed as u32, (seed >> 32) as u32];
        let values = (0..(rank * inputs).div_ceil(4)).flat_map(|i| {
            let counter = [i as u32, (i >> 32) as u32, number as u32, 0];
            // 24 bits each, as many as an f32 below 1 has.
            let unit = |word: u32| (word >> 8) as f32 / (1 << 24) as f32;
            philox4x32_10(counter, key).map(|word| (2. * unit(word) - 1.) * bound)
        });
        let values: Vec<f32> = values.take(rank * inputs).collect();
        let values = Tensor::from_vec(values, (rank, inputs), var.device())?;
        var.set(&values.to_dtype(var.dtype())?)?;
    }
    Ok(())
}

/// A model's file with other values for some of its tensors, to be written by [`rewrite`](crate::rewrite): with
/// [`dequantize`](crate::rewrite::dequantize) in high precision, with [`quantize`](crate::rewrite::quantize) in FP8.
///
/// Tensors without a variable, which the model does not use, keep their values.
pub struct Trained<'a> {
    source: &'a dyn Source,
    values: BTreeMap<String, Tensor>,
}

impl<'a> Trained<'a> {
    /// The model of `source` with the values of `vars`.
    ///
    /// # Errors
    /// If the lock of `vars` is poisoned.
    pub fn new(source: &'a dyn Source, vars: &VarMap) -> Result<Self> {
        let vars = locked(vars)?;
        let values = vars.iter().map(|(name, var)| (name.clone(), var.detach()));
        Ok(Self {
            source,
            values: values.collect(),
        })
    }
}

impl std::fmt::Debug for Trained<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trained")
            .field("values", &self.values.len())
            .finish_non_exhaustive()
    }
}

impl Source for Trained<'_> {
    fn names(&self) -> Vec<String> {
        self.source.names()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        self.source.shape(name)
    }

    fn dtype(&self, name: &str) -> Option<DType> {
        match self.values.get(name) {
            Some(value) => Some(value.dtype()),
            None => self.source.dtype(name),
        }
    }

    fn is_fp8(&self, name: &str) -> bool {
        !self.values.contains_key(name) && self.source.is_fp8(name)
    }

    fn value(&self, name: &str, dtype: DType) -> crate::fp8_files::Result<Tensor> {
        match self.values.get(name) {
            Some(value) => Ok(value.to_device(&Device::Cpu)?.to_dtype(dtype)?),
            None => self.source.value(name, dtype),
        }
    }

    fn config(&self) -> Option<&Value> {
        self.source.config()
    }

    fn directory(&self) -> Option<PathBuf> {
        self.source.directory()
    }

    fn files(&self) -> crate::fp8_files::Result<BTreeMap<String, Value>> {
        self.source.files()
    }

    fn tied(&self) -> BTreeMap<String, String> {
        self.source.tied()
    }
}
