//! The matrices of an adapter.

use super::config::AdapterConfig;
use super::naming::Naming;
use super::{CONFIG_FILE, PREFIX, TENSORS_FILE, json};
use crate::atomic::{FileError, Part, replace_together, write_json, write_safetensors};
use crate::error::{AdapterError, Error, Result};
use crate::read::{MAX_CONFIG, read_text};
use crate::safetensors_file::SafetensorsFile;
use candle_core::{DType, Device, Tensor};
use safetensors::Dtype;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// The ends of the names of A and B.
const MATRICES: [&str; 2] = ["lora_A.weight", "lora_B.weight"];
/// The ends of the names of a saved layer's tensors.
const PARTS: [&str; 2] = ["weight", "bias"];
/// The entry of the file's metadata that names classes, as JSON.
const LABELS: &str = "labels";
/// The paths of a layer that PEFT's model of a BERT has, and ours does not need.
pub(super) const POOLERS: [&str; 2] = ["pooler.dense", "bert.pooler.dense"];

/// An adapter on disk. Its matrices are read one layer at a time.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_files::adapter::{AdapterConfig, AdapterFile, Targets, write_adapter};
/// # let dir = tempfile::tempdir()?;
/// let a = Tensor::ones((2, 16), DType::F32, &Device::Cpu)?;
/// let b = Tensor::ones((8, 2), DType::F32, &Device::Cpu)?;
/// let config = AdapterConfig::new(2).with_targets(Targets::names(["fc"]));
/// write_adapter(dir.path(), &config, [("model.fc".to_string(), [a, b])])?;
///
/// let file = AdapterFile::open(dir.path())?;
/// assert_eq!(file.config(), &config);
/// let layers = file.layers(&["model.fc", "model.other"])?;
/// assert_eq!(layers, [("model.fc", "model.fc".to_string())]);
/// let [a, b] = file.matrices("model.fc", (8, 16), DType::F32, &Device::Cpu)?;
/// assert_eq!((a.dims(), b.dims()), (&[2, 16][..], &[8, 2][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AdapterFile {
    config: AdapterConfig,
    tensors: SafetensorsFile,
    /// The layers that it replaces.
    saved: Vec<SavedLayer>,
}

/// A linear layer that an adapter replaces.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SavedLayer {
    /// Its path in the adapter.
    pub path: String,
    /// (out_features, in_features).
    pub sizes: (usize, usize),
    /// Whether it has a bias.
    pub bias: bool,
}

impl AdapterFile {
    /// Opens the adapter in the directory `dir`.
    ///
    /// # Errors
    /// [`Error::Read`] if a file is missing; [`Error::UnsupportedScheme`] for an adapter of another kind: not LoRA, with `use_dora`,
    /// with biases, ..; [`AdapterError::Extra`] for saved modules that are not linear layers; [`Error::Json`] for names of classes that
    /// are not a list of texts; and as [`SafetensorsFile::open`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let path = dir.as_ref().join(CONFIG_FILE);
        let mut config = json::parse(&path, &read_text(&path, MAX_CONFIG)?)?;
        let tensors = SafetensorsFile::open(&dir.as_ref().join(TENSORS_FILE))?;
        if let Some(labels) = tensors.metadata(LABELS) {
            let labels = serde_json::from_str(labels);
            let what = "the metadata entry `labels`, a list of texts,";
            config.labels = labels.map_err(|error| Error::json(tensors.path(), what, error))?;
        }
        let saved = saved(&config, &tensors)?;
        Ok(Self {
            config,
            tensors,
            saved,
        })
    }

    /// The configuration.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// The linear layers that it replaces, sorted by path.
    pub fn saved(&self) -> &[SavedLayer] {
        &self.saved
    }

    /// Weight and bias of a layer of [`AdapterFile::saved`].
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn saved_layer(
        &self,
        layer: &SavedLayer,
        dtype: DType,
        device: &Device,
    ) -> Result<(Tensor, Option<Tensor>)> {
        let read = |part: &str| -> Result<Tensor> {
            let name = name(&layer.path, part);
            Ok(self.tensors.tensor(&name, device)?.to_dtype(dtype)?)
        };
        let bias = layer.bias.then(|| read("bias")).transpose()?;
        Ok((read("weight")?, bias))
    }

    /// The file of tensors.
    pub fn path(&self) -> &Path {
        self.tensors.path()
    }

    /// Whether the file has matrices of the layer at `path`, a path of the adapter.
    fn has(&self, path: &str) -> bool {
        let mut names = MATRICES.into_iter().map(|matrix| name(path, matrix));
        names.any(|name| self.tensors.shape(&name).is_some())
    }

    /// How the adapter names layers with these `paths` in the base.
    pub fn naming(&self, paths: &[&str]) -> Naming {
        Naming::find(paths, |path| self.has(path))
    }

    /// The ones among the base's linear layers `paths` that the adapter changes, in order, each with its path in the adapter. Matrices of a
    /// BERT's pooler are ignored if the base has no pooler: features do not need it.
    ///
    /// # Errors
    /// [`AdapterError::Missing`] if the file lacks a matrix of a targeted layer; [`AdapterError::Extra`] for tensors of any other layer;
    /// [`AdapterError::NoTarget`] if no layer is targeted.
    pub fn layers<'a>(&self, paths: &[&'a str]) -> Result<Vec<(&'a str, String)>> {
        let naming = self.naming(paths);
        let mut layers = vec![];
        for path in paths {
            let own = naming.of(path);
            if self.config.matches(&own)? {
                layers.push((*path, own));
            }
        }
        let expected: BTreeSet<String> = layers.iter().flat_map(|(_, own)| names(own)).collect();
        let ignored: BTreeSet<String> = POOLERS
            .into_iter()
            .filter(|path| self.config.matches(path).unwrap_or(false))
            .flat_map(names)
            .collect();
        let path = self.path().to_path_buf();
        let saved = self.saved.iter();
        let saved = saved.flat_map(|layer| PARTS.map(|part| name(&layer.path, part)));
        let ignored: BTreeSet<String> = ignored.into_iter().chain(saved).collect();
        let extra = self.tensors.names();
        let extra = extra.filter(|name| !expected.contains(name) && !ignored.contains(name));
        let mut extra: Vec<String> = extra.collect();
        if !extra.is_empty() {
            extra.sort();
            return Err(AdapterError::Extra { path, extra }.into());
        }
        if layers.is_empty() && self.saved.is_empty() {
            return Err(self
                .config
                .no_target(self.config.targets.to_string(), paths));
        }
        let missing = expected.into_iter();
        let missing = missing.filter(|name| self.tensors.shape(name).is_none());
        let missing: Vec<String> = missing.collect();
        match missing.is_empty() {
            true => Ok(layers),
            false => Err(AdapterError::Missing { path, missing }.into()),
        }
    }

    /// Fails unless the matrices of the layer at `path`, a path of the adapter, fit its (out_features, in_features).
    ///
    /// # Errors
    /// As [`AdapterFile::matrices`]; no tensor is read.
    pub fn check_sizes(
        &self,
        path: &str,
        (out_features, in_features): (usize, usize),
    ) -> Result<()> {
        let rank = self.config.rank_of(path)?;
        let shapes = [[rank, in_features], [out_features, rank]];
        for (name, expected) in names(path).into_iter().zip(shapes) {
            let Some(shape) = self.tensors.shape(&name) else {
                let missing = vec![name];
                let path = self.path().to_path_buf();
                return Err(AdapterError::Missing { path, missing }.into());
            };
            if shape != expected {
                return Err(Error::TensorShape {
                    got: shape.to_vec(),
                    expected: format!(
                        "{expected:?} for rank {rank} and a layer of {in_features} to {out_features} features"
                    ),
                    tensor: name,
                });
            }
            let dtype = self.tensors.dtype(&name);
            if !matches!(dtype, Some(Dtype::F32 | Dtype::BF16 | Dtype::F16)) {
                return Err(self.tensors.wrong_dtype(&name, "F32, BF16 or F16"));
            }
        }
        Ok(())
    }

    /// A `[rank, in_features]` and B `[out_features, rank]` of the layer at `path`, a path of the adapter, with `sizes` (out_features, in_features).
    ///
    /// # Errors
    /// [`AdapterError::Missing`], [`Error::TensorShape`], and [`Error::TensorDType`] for another dtype than f32, bf16 and f16.
    pub fn matrices(
        &self,
        path: &str,
        sizes: (usize, usize),
        dtype: DType,
        device: &Device,
    ) -> Result<[Tensor; 2]> {
        self.check_sizes(path, sizes)?;
        let [a, b] = names(path);
        let read = |name: &str| -> Result<Tensor> {
            Ok(self.tensors.tensor(name, device)?.to_dtype(dtype)?)
        };
        Ok([read(&a)?, read(&b)?])
    }
}

/// The layers in the modules that the configuration saves.
fn saved(config: &AdapterConfig, tensors: &SafetensorsFile) -> Result<Vec<SavedLayer>> {
    let (mut layers, mut extra) = (BTreeMap::new(), vec![]);
    let names: BTreeSet<String> = tensors.names().collect();
    for full in &names {
        let own = full
            .strip_prefix(PREFIX)
            .and_then(|own| own.strip_prefix('.'));
        let Some((path, part)) = own.and_then(|own| own.rsplit_once('.')) else {
            continue;
        };
        if !config.is_saved(path) || MATRICES.iter().any(|matrix| full.ends_with(matrix)) {
            continue;
        }
        match (
            part,
            tensors.shape(full),
            tensors.shape(&name(path, PARTS[0])),
        ) {
            ("weight", Some(&[out_features, in_features]), _) => {
                let bias = name(path, PARTS[1]);
                layers.insert(
                    path.to_string(),
                    SavedLayer {
                        path: path.to_string(),
                        sizes: (out_features, in_features),
                        bias: names.contains(&bias),
                    },
                );
            }
            ("bias", Some(bias), Some(&[out_features, _])) if *bias == [out_features] => {}
            _ => extra.push(full.clone()),
        }
    }
    match extra.is_empty() {
        true => Ok(layers.into_values().collect()),
        false => {
            let path = tensors.path().to_path_buf();
            Err(AdapterError::Extra { path, extra }.into())
        }
    }
}

/// The names of both matrices of the layer at `path`.
fn names(path: &str) -> [String; 2] {
    MATRICES.map(|matrix| name(path, matrix))
}

/// The name of a matrix of the layer at `path`.
fn name(path: &str, matrix: &str) -> String {
    format!("{PREFIX}.{path}.{matrix}")
}

/// Writes an adapter of the matrices A and B of layers, by path, into the directory `dir`, which is created if necessary. Both files are
/// replaced together.
///
/// # Errors
/// As [`write_adapter_with`].
pub fn write_adapter(
    dir: impl AsRef<Path>,
    config: &AdapterConfig,
    matrices: impl IntoIterator<Item = (String, [Tensor; 2])>,
) -> Result<()> {
    write_adapter_with(dir, config, matrices, [])
}

/// [`write_adapter`] with the layers of [`AdapterConfig::saved`], weight and bias by path.
///
/// # Errors
/// [`Error::Write`] if a file cannot be written. Old files are then unchanged.
pub fn write_adapter_with(
    dir: impl AsRef<Path>,
    config: &AdapterConfig,
    matrices: impl IntoIterator<Item = (String, [Tensor; 2])>,
    saved: impl IntoIterator<Item = (String, (Tensor, Option<Tensor>))>,
) -> Result<()> {
    let dir = dir.as_ref();
    std::fs::create_dir_all(dir).map_err(FileError::io(dir, "create the directory"))?;
    let mut tensors = BTreeMap::new();
    for (path, matrices) in matrices {
        let matrices = matrices.map(|tensor| tensor.detach());
        tensors.extend(names(&path).into_iter().zip(matrices));
    }
    for (path, (weight, bias)) in saved {
        tensors.insert(name(&path, PARTS[0]), weight.detach());
        tensors.extend(bias.map(|bias| (name(&path, PARTS[1]), bias.detach())));
    }
    let mut metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    if !config.labels.is_empty() {
        let labels = serde_json::Value::from(config.labels.clone());
        metadata.insert(LABELS.to_string(), labels.to_string());
    }
    let config = json::written(config);
    let parts = vec![
        Part::new(CONFIG_FILE, |file| {
            write_json(file, &dir.join(CONFIG_FILE), &config)
        }),
        Part::new(TENSORS_FILE, |file| {
            write_safetensors(file, &dir.join(TENSORS_FILE), &tensors, Some(&metadata))
        }),
    ];
    Ok(replace_together(dir, parts)?)
}
