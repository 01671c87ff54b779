//! Reads FP8 checkpoints: a VarBuilder that recognizes FP8 weights.
//!
//! FP8 layers (`fp8_recipes::nn`, through [`static_weight`](crate::static_weight())) get the codes and their scales. All other layers get
//! dequantized weights, so stock models run too, without FP8. candle's own VarBuilders also work with FP8 layers, but they read no
//! configuration, and they give stock layers unscaled codes without an error.
//!
//! To train all weights of an FP8 checkpoint, [`dequantize_into`] sets the variables of a VarMap to its values. To train adapters on top
//! of it, build the base from [`var_builder`] and the adapters from a separate VarMap.
//!
//! The configuration beside the files declares how layers are stored and how their inputs are scaled; without one, names and shapes
//! decide. Each family of checkpoints has a file in `families/`, which maps the family's names. All families are brought into one form:
//! canonical names, E4M3 codes `[N, K]`, and a dequant_scale to multiply by, whatever the file calls it. The checks are the same for all:
//! every FP8 weight has its scale and every scale its weight; shapes, dtypes and configuration agree; no scale is NaN, infinite or
//! negative.
//!
//! | part | file |
//! |---|---|
//! | the files of a directory | `directory.rs` |
//! | their family | `config.rs` |
//! | their tensors, checked | `catalogue.rs`, `pair.rs` |
//! | values | `weight.rs`, `read.rs`, `layout.rs` |
//! | a VarBuilder | `backend.rs` |

pub(crate) mod at;
mod backend;
mod catalogue;
mod config;
mod dequantize;
pub(crate) mod directory;
mod experts;
mod facts;
mod families;
mod family;
mod family_name;
mod files;
mod kv;
mod kv_names;
mod layout;
mod loaded_names;
mod options;
mod pair;
mod raw;
mod read;
mod refuse;
mod rows;
pub(crate) mod static_weight;
pub(crate) mod survey;
mod targets;
mod weight;

pub use backend::{open_dir, var_builder};
pub use dequantize::{DequantizeOptions, DequantizeReport, dequantize_into, dequantize_into_with};
pub use family_name::FamilyName;
pub(crate) use kv_names::is_attention;
pub use loaded_names::LoadedNames;
pub use options::{Inputs, OpenOptions};
pub use read::StoredLayer;

use crate::error::{Error, Result};
use crate::names::split;
use crate::safetensors_file::SafetensorsFile;
use crate::scheme::POWER_OF_TWO_INPUTS;
use catalogue::Catalogue;
use family::Family;
use files::Files;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One or more safetensors files whose FP8 weights all have their scales.
///
/// Tensors are read from the files when they are requested; nothing else is held in memory. Names are canonical, those of the
/// unquantized model in transformers: `X.weight`, `X.bias`, and `..self_attn.k_scale` and `..self_attn.v_scale` for the scales of an FP8
/// cache, whatever the family calls them.
///
/// ```
/// use candle_core::{DType, Device};
/// use fp8_recipes::load::Checkpoint;
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let checkpoint = Checkpoint::open_dir(dir.path())?;
/// assert_eq!(checkpoint.layer_paths(), ["fc"]);
/// assert_eq!(checkpoint.other_names(), ["fc.bias"]);
/// let weight = checkpoint.stored_layer("fc", &Device::Cpu)?.codes.dequantize(DType::F32)?;
/// assert_eq!(weight.dims(), [32, 64]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Checkpoint {
    files: Files,
    catalogue: Catalogue,
    config: Option<serde_json::Value>,
    params: Option<serde_json::Value>,
    /// Names of weights that are stored under another name, with that name.
    pub(crate) tied: BTreeMap<String, String>,
    loaded: LoadedNames,
    /// FP8 layers whose values a VarBuilder hands out in place of their codes.
    decoded: HashSet<String>,
}

impl Checkpoint {
    /// Opens the model in `dir` and checks it as [`Checkpoint::open`] does: the files that `model.safetensors.index.json` names, or
    /// `model.safetensors`, or Mistral's `consolidated.safetensors`, with an index or without (first if there is `params.json` and no
    /// `config.json`), or the only safetensors file there. With an index only the files that it names are read; a weight and its scale
    /// may be in different ones.
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

    /// Opens the files and the configuration beside them, if there is one, and checks them: each file is complete, every FP8 weight
    /// `X.weight` has a scale of the declared shape, every scale belongs to an FP8 weight, and the configuration declares nothing that
    /// this library cannot read.
    ///
    /// # Errors
    /// If a file cannot be read, is not a safetensors file, is shorter or longer than its header says or names a tensor twice; if an FP8
    /// weight has no scale or a scale no FP8 weight; [`Error::UnsupportedScheme`] for a configuration that this library cannot read and
    /// [`Error::SchemeMismatch`] for one that contradicts the file.
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
        let directories = files.iter().map(|file| file.path().parent());
        let directories = directories.map(|dir| dir.unwrap_or(Path::new("")).to_path_buf());
        let directories: Vec<PathBuf> = directories.collect();
        // The files of one directory are one model.
        let mut families: HashMap<&Path, Arc<Family>> = HashMap::new();
        let (mut config, mut params) = (None, None);
        for directory in &directories {
            if families.contains_key(directory.as_path()) {
                continue;
            }
            let of_model = config::read(directory)?;
            let here = files.iter_mut().zip(&directories);
            let here = here.filter_map(|(file, at)| (at == directory).then_some(file));
            let mut here: Vec<&mut SafetensorsFile> = here.collect();
            experts::cut(&mut here, of_model.as_ref())?;
            let here: Vec<&SafetensorsFile> = here.into_iter().map(|file| &*file).collect();
            let (family, own) = config::family(directory, of_model.as_ref(), &here, options)?;
            families.insert(directory, family.into());
            config = config.or(of_model);
            params = params.or(own);
        }
        let families = directories
            .iter()
            .map(|dir| families[dir.as_path()].clone());
        let families = families.collect();
        let index = index_of(&files, listed)?;
        let mut tied = BTreeMap::new();
        let mut power_of_two_inputs = HashSet::new();
        for file in &files {
            for (name, value) in file.all_metadata() {
                if file.dtype(value).is_some() && file.dtype(name).is_none() {
                    tied.insert(name.clone(), value.clone());
                }
            }
            if let Some(json) = file.metadata(POWER_OF_TWO_INPUTS) {
                let what = "the metadata entry fp8_power_of_two_inputs";
                let layers: Vec<String> = serde_json::from_str(json)
                    .map_err(|error| Error::json(file.path(), what, error))?;
                power_of_two_inputs.extend(layers);
            }
        }
        let files = Files {
            files,
            families,
            index,
        };
        let mut catalogue = files.catalogue(options)?;
        for (name, weight) in &mut catalogue.weights {
            if power_of_two_inputs.contains(split(name).0) {
                weight.scheme.input = weight.scheme.input.with_power_of_two(true);
            }
        }
        Ok(Self {
            files,
            catalogue,
            config,
            params,
            tied,
            loaded: LoadedNames::default(),
            decoded: HashSet::new(),
        })
    }

    /// The names that models have requested from a VarBuilder of this checkpoint. An export can require all of them
    /// (`ExportOptions::with_loaded` of fp8-recipes).
    pub fn loaded_names(&self) -> LoadedNames {
        self.loaded.clone()
    }

    /// Makes the VarBuilder of this checkpoint hand out the values of an FP8 layer in place of its codes: layers of
    /// `fp8_recipes::nn` then hold these in the VarBuilder's dtype, which takes several times the memory, and do not cast inputs. Nothing
    /// else changes, neither [`Checkpoint::stored_layer`] nor what is rewritten.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if there is no FP8 layer at `path`.
    ///
    /// ```
    /// # use fp8_recipes as fp8;
    /// use candle_core::{DType, Device};
    /// use fp8::{load::Checkpoint, nn};
    /// # let dir = tempfile::tempdir()?;
    /// # fp8_test_support::files::fp8_model(dir.path());
    /// let mut checkpoint = Checkpoint::open_dir(dir.path())?;
    /// checkpoint.decode("fc")?;
    /// let layer = nn::linear(64, 32, checkpoint.var_builder(DType::F32, &Device::Cpu)?.pp("fc"))?;
    /// assert!(layer.static_weight().is_none());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn decode(&mut self, path: &str) -> Result<()> {
        match self.layer_scheme(path) {
            Some(_) => self.decoded.insert(path.to_string()),
            None => return Err(self.missing(&crate::names::weight_name(path))),
        };
        Ok(())
    }

    /// Whether [`Checkpoint::decode`] was called for this layer.
    pub fn is_decoded(&self, path: &str) -> bool {
        self.decoded.contains(path)
    }
}

/// The file of each stored name. An index takes precedence over the files.
fn index_of(
    files: &[SafetensorsFile],
    listed: Option<&directory::Found>,
) -> Result<HashMap<String, usize>> {
    let listed = listed.map(|found| found.index.clone()).unwrap_or_default();
    let mut index = listed.clone();
    // A tensor of all experts is known by its pieces only.
    index.retain(|name, at| files[*at].dtype(name).is_some());
    for (at, file) in files.iter().enumerate() {
        for name in file.names().filter(|name| !listed.contains_key(name)) {
            if let Some(other) = index.insert(name.clone(), at) {
                return Err(Error::DuplicateTensor {
                    tensor: name,
                    first: files[other].path().to_path_buf(),
                    second: file.path().to_path_buf(),
                });
            }
        }
    }
    Ok(index)
}
