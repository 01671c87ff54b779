//! Reading FP8 checkpoints: a VarBuilder that knows what is FP8.
//!
//! Layers that know of FP8 (`fp8_recipes::nn`, by [`static_weight`](crate::static_weight())) get the codes and their scales. Any other
//! layer that asks for a weight gets its dequantized value, so stock models run too, without FP8. candle's own VarBuilders work
//! with those layers as well, but they know no configuration, and they hand codes to stock layers unscaled, with no error.
//!
//! To train all weights of an FP8 checkpoint, [`dequantize_into`] sets the variables of a VarMap to its values; to train adapters
//! on top of it, build the base from [`var_builder`] and the adapters from a VarMap of their own.
//!
//! The configuration beside the files says how layers are stored and how their inputs are scaled; without one, names and
//! shapes decide. Every family of checkpoints has its own file in `families/`, which maps the family's names, and all
//! are brought into one form: canonical names, E4M3 codes `[N, K]`, and a dequant_scale that is multiplied, whatever the
//! file calls it. The checks are the same for all: every FP8 weight has its scale and every scale its weight, shapes, dtypes
//! and configuration agree, no scale is NaN, infinite or negative.
//!
//! | part | file |
//! |---|---|
//! | which files a directory means | `directory.rs` |
//! | which family they are | `config.rs` |
//! | what is in them, checked | `catalogue.rs`, `pair.rs` |
//! | values | `read.rs`, `layout.rs` |
//! | a VarBuilder | `backend.rs` |

mod access;
mod backend;
mod catalogue;
mod config;
mod dequantize;
mod directory;
mod experts;
mod facts;
mod families;
mod family;
mod family_name;
mod kv;
mod kv_names;
mod layout;
mod loaded_names;
mod options;
mod pair;
mod read;
mod refuse;
mod scales;
pub(crate) mod static_weight;
mod targets;

pub use backend::{open_dir, var_builder};
pub use dequantize::{DequantizeOptions, DequantizeReport, dequantize_into, dequantize_into_with};
pub use family_name::FamilyName;
pub use loaded_names::LoadedNames;
pub use options::{Inputs, OpenOptions};
pub use read::StoredLayer;

use crate::error::{Error, Result};
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::POWER_OF_TWO_INPUTS;
use catalogue::{Catalogue, Source};
use config::Configuration;
use family::Family;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One or more safetensors files whose FP8 weights all have their scales.
///
/// Tensors are read from the files when they are asked for; nothing else is held in memory. Names are canonical, those of
/// the unquantized model in transformers: `X.weight`, `X.bias`, and `..self_attn.k_scale` and `..self_attn.v_scale` for the scales
/// of an FP8 cache, whatever the family calls them.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use fp8_recipes::load::Checkpoint;
/// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
/// # let dir = tempfile::tempdir()?;
/// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
/// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
/// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
/// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
/// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
/// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
/// let checkpoint = Checkpoint::open_dir(&fp8)?;
/// assert_eq!(checkpoint.layer_paths(), ["fc"]);
/// assert_eq!(checkpoint.other_names(), ["fc.bias"]);
/// let weight = checkpoint.stored_layer("fc", &Device::Cpu)?.codes.dequantize(DType::F32)?;
/// assert_eq!(weight.dims(), [32, 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<SafetensorsFile>,
    /// Of each file.
    families: Vec<Arc<dyn Family>>,
    /// The file of each stored name.
    index: HashMap<String, usize>,
    catalogue: Catalogue,
    config: Option<serde_json::Value>,
    params: Option<serde_json::Value>,
    /// Names under which a tensor is known beside its own: tied weights are stored once.
    tied: HashMap<String, String>,
    /// Layers whose dynamic input scales are powers of two.
    power_of_two_inputs: HashSet<String>,
    loaded: LoadedNames,
}

impl Checkpoint {
    /// Opens the model in `dir` and checks it as [`Checkpoint::open`] does: the files that `model.safetensors.index.json` names, or
    /// `model.safetensors`, or Mistral's `consolidated.safetensors`, with an index or without (first where there is `params.json` and
    /// no `config.json`), or the only safetensors file there. With an index only the files that it names count; a weight and its
    /// scale may be in different ones.
    ///
    /// # Errors
    /// [`Error::NoCheckpoint`] if there is no such file, [`Error::Index`] for an index that names a missing file, a path out of the
    /// directory or a tensor that its file lacks; else as [`Checkpoint::open`].
    pub fn open_dir(dir: impl AsRef<Path>) -> Result<Self> {
        Self::open_dir_with(dir, &OpenOptions::default())
    }

    /// As [`Checkpoint::open_dir`], with `options`.
    ///
    /// # Errors
    /// As [`Checkpoint::open_dir`].
    pub fn open_dir_with(dir: impl AsRef<Path>, options: &OpenOptions) -> Result<Self> {
        let found = directory::files_of(dir.as_ref())?;
        Self::of_files(&found.paths, Some(&found), options)
    }

    /// Opens the files and the configuration beside them, if there is one, and checks them: each file is whole, every
    /// FP8 weight `X.weight` has its scale in the shape that the configuration tells, every scale stands beside an FP8
    /// weight, and the configuration describes nothing that this library does not read.
    ///
    /// # Errors
    /// If a file cannot be read, is not a safetensors file, is shorter or longer than its header says or names a tensor
    /// twice; if an FP8 weight has no scale or a scale no FP8 weight; [`Error::UnsupportedScheme`] for a configuration
    /// of another kind and [`Error::SchemeMismatch`] for one that contradicts the file.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        Self::open_with(paths, &OpenOptions::default())
    }

    /// As [`Checkpoint::open`], with `options`.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn open_with<P: AsRef<Path>>(paths: &[P], options: &OpenOptions) -> Result<Self> {
        let paths: Vec<PathBuf> = paths.iter().map(|path| path.as_ref().into()).collect();
        Self::of_files(&paths, None, options)
    }

    fn of_files(
        paths: &[PathBuf],
        listed: Option<&directory::Found>,
        options: &OpenOptions,
    ) -> Result<Self> {
        let files = paths.iter().map(|path| SafetensorsFile::open(path));
        let mut files: Vec<SafetensorsFile> = files.collect::<Result<_>>()?;
        files.iter().try_for_each(refuse::file)?;
        if let Some(found) = listed {
            found.check(&files)?;
        }
        let directories: Vec<PathBuf> = files
            .iter()
            .map(|file| file.path().parent().unwrap_or(Path::new("")).to_path_buf())
            .collect();
        // The files of one directory are one model.
        let mut known: HashMap<&Path, Configuration> = HashMap::new();
        for directory in &directories {
            if !known.contains_key(directory.as_path()) {
                let config = config::read(directory)?;
                let mut here: Vec<&mut SafetensorsFile> = files
                    .iter_mut()
                    .zip(&directories)
                    .filter_map(|(file, at)| (at == directory).then_some(file))
                    .collect();
                experts::cut(&mut here, config.as_ref())?;
                let here: Vec<&SafetensorsFile> = here.into_iter().map(|file| &*file).collect();
                known.insert(
                    directory,
                    Configuration::new(directory, config, &here, options)?,
                );
            }
        }
        let families = directories
            .iter()
            .map(|dir| known[dir.as_path()].family.clone());
        let families: Vec<Arc<dyn Family>> = families.collect();
        let (mut config, mut params) = (None, None);
        for dir in &directories {
            let Some(found) = known.remove(dir.as_path()) else {
                continue;
            };
            config = config.or(found.config);
            params = params.or(found.params);
        }
        let mut checkpoint = Self {
            index: listed.map(|found| found.index.clone()).unwrap_or_default(),
            files,
            families,
            catalogue: Catalogue::default(),
            config,
            params,
            tied: HashMap::new(),
            power_of_two_inputs: HashSet::new(),
            loaded: LoadedNames::default(),
        };
        checkpoint.index_tensors(listed.is_some_and(|found| !found.index.is_empty()))?;
        checkpoint.read_metadata()?;
        let source = Source {
            files: &checkpoint.files,
            families: &checkpoint.families,
            index: &checkpoint.index,
        };
        checkpoint.catalogue = source.catalogue(options)?;
        for (name, weight) in &mut checkpoint.catalogue.weights {
            let path = crate::names::split(name).0;
            weight.power_of_two_inputs |= checkpoint.power_of_two_inputs.contains(path);
        }
        Ok(checkpoint)
    }

    /// Which file holds a name. Where an index says it, that counts.
    fn index_tensors(&mut self, listed: bool) -> Result<()> {
        // Tensors of all experts are known by their parts.
        let files = &self.files;
        self.index
            .retain(|name, at| files[*at].dtype(name).is_some());
        let told = match listed {
            true => self.index.clone(),
            false => HashMap::new(),
        };
        for (at, file) in self.files.iter().enumerate() {
            for name in file.names() {
                if told.contains_key(&name) {
                    continue;
                }
                if let Some(&other) = self.index.get(&name) {
                    return Err(Error::DuplicateTensor {
                        tensor: name,
                        first: self.files[other].path().to_path_buf(),
                        second: file.path().to_path_buf(),
                    });
                }
                self.index.insert(name, at);
            }
        }
        Ok(())
    }

    /// Ties and layers with powers of two.
    fn read_metadata(&mut self) -> Result<()> {
        for file in &self.files {
            for (name, value) in file.all_metadata() {
                if file.dtype(value).is_some() && file.dtype(name).is_none() {
                    self.tied.insert(name.clone(), value.clone());
                }
            }
            if let Some(json) = file.metadata(POWER_OF_TWO_INPUTS) {
                let layers: Vec<String> =
                    serde_json::from_str(json).map_err(|error| Error::Json {
                        path: file.path().to_path_buf(),
                        what: "the metadata entry fp8_power_of_two_inputs",
                        reason: error.to_string(),
                    })?;
                self.power_of_two_inputs.extend(layers);
            }
        }
        Ok(())
    }

    /// The names that models have asked a VarBuilder of this checkpoint for; an export can demand that all of them are written
    /// (`ExportOptions::with_loaded` of fp8-recipes).
    pub fn loaded_names(&self) -> LoadedNames {
        self.loaded.clone()
    }
}
