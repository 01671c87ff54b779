//! Reading FP8 checkpoints: a VarBuilder that knows what is FP8.
//!
//! Layers of [`crate::nn`] get the codes and their scales; any other layer that asks for the weight gets its
//! dequantized value, so stock models run too (without FP8). candle's own VarBuilders also work with
//! [`crate::nn`], but know no configuration, and hand the codes to stock layers unscaled, with no error.
//!
//! To train all weights of an FP8 checkpoint, [`dequantize_into`] sets the variables of a VarMap to its values; to train adapters
//! on top of it, build the base from [`var_builder`] and the adapters from a VarMap of their own.
//!
//! The `config.json` beside the files says how layers are stored and what becomes of their inputs; without one the
//! shapes of the scales decide. Every family of checkpoints has a file of its own here and is brought into one form:
//!
//! | file | family |
//! |---|---|
//! | `compressed_tensors.rs` | `quant_method: "compressed-tensors"`: weights per tensor, channel, block and MX; inputs static, dynamic or not cast (weight-only) |
//! | `fp8.rs` | `quant_method: "fp8"`: vLLM's and AutoFP8's, DeepSeek's and Qwen's blocks |
//! | `by_shape.rs` | no configuration |

mod backend;
mod by_shape;
mod compressed_tensors;
mod config;
mod dequantize;
mod family;
mod fp8;
mod scheme;
mod stored;
mod targets;

pub use backend::LoadedNames;
pub(crate) use backend::{holds, is_checked, scheme};
pub use dequantize::{DequantizeOptions, DequantizeReport, dequantize_into, dequantize_into_with};
pub(crate) use scheme::{
    InputScheme, LayerScheme, POWER_OF_TWO_INPUTS, granularity_by_shape, shapes_text,
};

use crate::check::is_float;
use crate::error::{Error, Result};
use crate::safetensors_file::SafetensorsFile;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use family::Family;
use safetensors::Dtype;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One or more safetensors files whose FP8 weights all have their scales.
///
/// Tensors are read from the files when they are asked for; nothing else is held in memory.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<SafetensorsFile>,
    /// Of each file.
    families: Vec<Arc<dyn Family>>,
    index: HashMap<String, usize>,
    /// Names under which a tensor is known beside its own: tied weights are stored once.
    tied: HashMap<String, String>,
    /// Layers whose dynamic input scales are powers of two.
    power_of_two_inputs: HashSet<String>,
    loaded: LoadedNames,
}

impl Checkpoint {
    /// Opens the files and the `config.json` beside them, if there is one, and checks them: each file is whole, every
    /// FP8 weight `X.weight` has its scale in the shape that the configuration tells, every scale stands beside an FP8
    /// weight, and the configuration describes nothing that this library does not read.
    ///
    /// # Errors
    /// If a file cannot be read, is no safetensors file, is shorter or longer than its header says or names a tensor
    /// twice; if an FP8 weight has no scale or a scale no FP8 weight; [`Error::UnsupportedScheme`] for a configuration
    /// of another kind and [`Error::SchemeMismatch`] for one that contradicts the file.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let mut checkpoint = Self {
            files: vec![],
            families: vec![],
            index: HashMap::new(),
            tied: HashMap::new(),
            power_of_two_inputs: HashSet::new(),
            loaded: LoadedNames::default(),
        };
        let mut families: HashMap<PathBuf, Arc<dyn Family>> = HashMap::new();
        for path in paths {
            let file = SafetensorsFile::open(path.as_ref())?;
            let directory = file.path().parent().unwrap_or(Path::new("")).to_path_buf();
            let family = match families.get(&directory) {
                Some(family) => family.clone(),
                None => config::family_of(&directory)?,
            };
            families.insert(directory, family.clone());
            checkpoint.add(file, family)?;
        }
        checkpoint.check()?;
        Ok(checkpoint)
    }

    fn add(&mut self, file: SafetensorsFile, family: Arc<dyn Family>) -> Result<()> {
        for name in file.names() {
            if let Some(&other) = self.index.get(&name) {
                return Err(Error::DuplicateTensor {
                    tensor: name,
                    first: self.files[other].path().to_path_buf(),
                    second: file.path().to_path_buf(),
                });
            }
            self.index.insert(name, self.files.len());
        }
        for (name, value) in file.all_metadata() {
            if file.dtype(value).is_some() && file.dtype(name).is_none() {
                self.tied.insert(name.clone(), value.clone());
            }
        }
        if let Some(json) = file.metadata(POWER_OF_TWO_INPUTS) {
            let layers: Vec<String> = serde_json::from_str(json).map_err(|error| Error::Json {
                path: file.path().to_path_buf(),
                what: "the metadata entry fp8_power_of_two_inputs",
                reason: error.to_string(),
            })?;
            self.power_of_two_inputs.extend(layers);
        }
        self.files.push(file);
        self.families.push(family);
        Ok(())
    }

    /// Dtype of a tensor in its file.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.files[*self.index.get(name)?].dtype(name)
    }

    /// Shape of a tensor in its file.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.files[*self.index.get(name)?].shape(name)
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> = self.index.keys().map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    /// Value of a metadata key in the first file that has it.
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.files.iter().find_map(|file| file.metadata(key))
    }

    /// A tensor as stored.
    ///
    /// # Errors
    /// If there is none of that name, it cannot be read, or candle has no such dtype.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        match self.index.get(name) {
            Some(&file) => self.files[file].tensor(name, device),
            None => Err(Error::MissingTensor {
                tensor: name.to_string(),
                place: self
                    .files
                    .iter()
                    .map(|file| file.path().display().to_string())
                    .collect::<Vec<_>>()
                    .join(", "),
            }),
        }
    }

    /// The names that models have asked a VarBuilder of this checkpoint for: see
    /// [`ExportOptions::with_loaded`](crate::ExportOptions::with_loaded).
    pub fn loaded_names(&self) -> LoadedNames {
        self.loaded.clone()
    }

    /// A VarBuilder over this checkpoint; other tensors than FP8 weights are cast to `dtype`.
    ///
    /// # Errors
    /// If `dtype` is another one than f32, bf16, f16 and f64: values cannot be held in it.
    pub fn var_builder(self, dtype: DType, device: &Device) -> Result<VarBuilder<'static>> {
        if !is_float(dtype) {
            return Err(Error::BuilderDType { got: dtype });
        }
        let backend = Box::new(backend::Backend(self));
        Ok(VarBuilder::from_backend(backend, dtype, device.clone()))
    }
}

/// Opens safetensors files as a VarBuilder: see [`Checkpoint`].
///
/// # Errors
/// As [`Checkpoint::open`] and [`Checkpoint::var_builder`].
pub fn var_builder<P: AsRef<Path>>(
    paths: &[P],
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    Checkpoint::open(paths)?.var_builder(dtype, device)
}
