//! The matrices of an adapter.

use super::config::AdapterConfig;
use super::{CONFIG_FILE, PREFIX, TENSORS_FILE, json};
use crate::atomic::{FileError, Part, replace_together, write_json, write_safetensors};
use crate::error::{AdapterError, Error, Result};
use crate::read::{MAX_CONFIG, read_text};
use crate::safetensors_file::SafetensorsFile;
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

/// The ends of the names of A and B.
const MATRICES: [&str; 2] = ["lora_A.weight", "lora_B.weight"];

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
/// file.check(["model.fc"])?;
/// let [a, b] = file.matrices("model.fc", (8, 16), DType::F32, &Device::Cpu)?;
/// assert_eq!((a.dims(), b.dims()), (&[2, 16][..], &[8, 2][..]));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct AdapterFile {
    config: AdapterConfig,
    tensors: SafetensorsFile,
}

impl AdapterFile {
    /// Opens the adapter in the directory `dir`.
    ///
    /// # Errors
    /// [`Error::Read`] if a file is missing; [`Error::UnsupportedScheme`] for an adapter of another kind: not LoRA, with `use_dora`,
    /// with biases, with `modules_to_save`, ..; and as [`SafetensorsFile::open`].
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let path = dir.as_ref().join(CONFIG_FILE);
        let config = json::parse(&path, &read_text(&path, MAX_CONFIG)?)?;
        let tensors = SafetensorsFile::open(&dir.as_ref().join(TENSORS_FILE))?;
        Ok(Self { config, tensors })
    }

    /// The configuration.
    pub fn config(&self) -> &AdapterConfig {
        &self.config
    }

    /// The file of tensors.
    pub fn path(&self) -> &Path {
        self.tensors.path()
    }

    /// Whether the file has matrices of the layer at `path`.
    pub fn has(&self, path: &str) -> bool {
        MATRICES
            .iter()
            .any(|matrix| self.tensors.shape(&name(path, matrix)).is_some())
    }

    /// Fails unless the file has the matrices of exactly the layers at these paths.
    ///
    /// # Errors
    /// [`AdapterError::Missing`] and [`AdapterError::Extra`], with the names.
    pub fn check<'a>(&self, paths: impl IntoIterator<Item = &'a str>) -> Result<()> {
        let paths = paths.into_iter();
        let expected = paths.flat_map(|path| MATRICES.map(|matrix| name(path, matrix)));
        let expected: Vec<String> = expected.collect();
        let path = self.path().to_path_buf();
        let extra = self.tensors.names().filter(|name| !expected.contains(name));
        let mut extra: Vec<String> = extra.collect();
        if !extra.is_empty() {
            extra.sort();
            return Err(AdapterError::Extra { path, extra }.into());
        }
        let missing = expected.into_iter();
        let missing = missing.filter(|name| self.tensors.shape(name).is_none());
        let missing: Vec<String> = missing.collect();
        match missing.is_empty() {
            true => Ok(()),
            false => Err(AdapterError::Missing { path, missing }.into()),
        }
    }

    /// A `[rank, in_features]` and B `[out_features, rank]` of the layer at `path` with (out_features, in_features).
    ///
    /// # Errors
    /// [`AdapterError::Missing`], [`Error::TensorShape`], and [`Error::TensorDType`] for another dtype than f32, bf16 and f16.
    pub fn matrices(
        &self,
        path: &str,
        (out_features, in_features): (usize, usize),
        dtype: DType,
        device: &Device,
    ) -> Result<[Tensor; 2]> {
        let rank = self.config.rank_of(path)?;
        let read = |matrix: &str, dims: [usize; 2]| -> Result<Tensor> {
            let name = name(path, matrix);
            let Some(shape) = self.tensors.shape(&name) else {
                return Err(AdapterError::Missing {
                    path: self.path().to_path_buf(),
                    missing: vec![name],
                }
                .into());
            };
            if shape != dims {
                return Err(Error::TensorShape {
                    got: shape.to_vec(),
                    expected: format!("{dims:?}: rank {rank}, {out_features} x {in_features}"),
                    tensor: name,
                });
            }
            let tensor = self.tensors.tensor(&name, device)?;
            match tensor.dtype() {
                DType::F32 | DType::BF16 | DType::F16 => Ok(tensor.to_dtype(dtype)?),
                got => Err(Error::TensorDType {
                    tensor: name,
                    got: got.as_str().to_string(),
                    expected: "f32, bf16 or f16".to_string(),
                }),
            }
        };
        let [a, b] = MATRICES;
        Ok([
            read(a, [rank, in_features])?,
            read(b, [out_features, rank])?,
        ])
    }
}

/// The name of a matrix of the layer at `path`.
fn name(path: &str, matrix: &str) -> String {
    format!("{PREFIX}.{path}.{matrix}")
}

/// Writes an adapter of the matrices A and B of layers, by path, into the directory `dir`, which is made if need be. Both files are
/// replaced together.
///
/// # Errors
/// [`Error::Write`] if a file cannot be written. Old files are then unchanged.
pub fn write_adapter(
    dir: impl AsRef<Path>,
    config: &AdapterConfig,
    matrices: impl IntoIterator<Item = (String, [Tensor; 2])>,
) -> Result<()> {
    let dir = dir.as_ref();
    std::fs::create_dir_all(dir).map_err(FileError::io(dir, "create the directory"))?;
    let mut tensors = BTreeMap::new();
    for (path, matrices) in matrices {
        for (matrix, tensor) in MATRICES.into_iter().zip(matrices) {
            tensors.insert(name(&path, matrix), tensor.detach());
        }
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
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
