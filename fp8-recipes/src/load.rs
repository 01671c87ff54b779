//! Reading FP8 checkpoints: a VarBuilder that knows what is FP8.
//!
//! Layers of [`crate::nn`] get the codes and their scales; any other layer that asks for the weight gets its
//! dequantized value, so stock models run too (without FP8). candle's own VarBuilders also work with
//! [`crate::nn`], but hand the codes to stock layers unscaled, with no error.

use crate::error::{Error, Result};
use crate::safetensors_file::SafetensorsFile;
use candle_core::{DType, Device, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use fp8_candle::Fp8Tensor;
use fp8_core::{Contraction, Granularity};
use safetensors::Dtype;
use std::collections::HashMap;
use std::path::Path;

/// A name that only [`Checkpoint`] answers to.
const CHECKED: &str = "__fp8_checked__";

/// Whether `vb` reads through a [`Checkpoint`], which has checked dtypes and scales.
pub(crate) fn is_checked(vb: &VarBuilder<'_>) -> bool {
    vb.contains_tensor(CHECKED)
}

/// Whether `vb` really holds a tensor of this name. `VarBuilder::zeros` says yes to every name.
pub(crate) fn holds(vb: &VarBuilder<'_>, name: &str) -> bool {
    vb.contains_tensor(name) && !vb.contains_tensor("__no_such_tensor__")
}

/// One or more safetensors files whose FP8 weights all have their scales (compressed-tensors `float-quantized`).
///
/// Tensors are read from the files when they are asked for; nothing else is held in memory.
#[derive(Debug)]
pub struct Checkpoint {
    files: Vec<SafetensorsFile>,
    index: HashMap<String, usize>,
}

impl Checkpoint {
    /// Opens the files and checks them: each is whole, every FP8 weight `X.weight` has `X.weight_scale`, every
    /// `X.weight_scale` stands beside an FP8 weight.
    ///
    /// # Errors
    /// If a file cannot be read, is no safetensors file, is shorter or longer than its header says, names a tensor
    /// twice, or an FP8 weight has no scale or a scale no FP8 weight.
    pub fn open<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let mut files: Vec<SafetensorsFile> = vec![];
        let mut index: HashMap<String, usize> = HashMap::new();
        for path in paths {
            let file = SafetensorsFile::open(path.as_ref())?;
            for name in file.names() {
                if let Some(&other) = index.get(&name) {
                    return Err(Error::DuplicateTensor {
                        tensor: name,
                        first: files[other].path().to_path_buf(),
                        second: file.path().to_path_buf(),
                    });
                }
                index.insert(name, files.len());
            }
            files.push(file);
        }
        let checkpoint = Self { files, index };
        checkpoint.check_scales()?;
        Ok(checkpoint)
    }

    fn check_scales(&self) -> Result<()> {
        let mut names: Vec<&String> = self.index.keys().collect();
        names.sort();
        for name in names {
            let dtype = self.dtype(name);
            if matches!(dtype, Some(Dtype::F8_E4M3 | Dtype::F8_E5M2)) {
                let scale = scale_name(name);
                if !self.index.contains_key(&scale) {
                    return Err(Error::MissingScale {
                        tensor: name.clone(),
                        missing: scale,
                    });
                }
                if dtype != Some(Dtype::F8_E4M3) {
                    return Err(wrong_dtype(name, dtype, "F8_E4M3"));
                }
            } else if let Some(weight) = name
                .strip_suffix("_scale")
                .filter(|n| n.ends_with("weight"))
            {
                if self.dtype(weight) != Some(Dtype::F8_E4M3) {
                    return Err(wrong_dtype(weight, self.dtype(weight), "F8_E4M3"));
                }
                if !matches!(dtype, Some(Dtype::F32 | Dtype::BF16 | Dtype::F16)) {
                    return Err(wrong_dtype(name, dtype, "F32, BF16 or F16"));
                }
            }
        }
        Ok(())
    }

    /// Dtype of a tensor in its file.
    pub fn dtype(&self, name: &str) -> Option<Dtype> {
        self.files[*self.index.get(name)?].dtype(name)
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

    /// The dequantized value of an FP8 weight in `dtype`, the stored tensor in `dtype` otherwise.
    fn value(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let stored = self.tensor(name, device)?;
        if stored.dtype() != DType::F8E4M3 || dtype == DType::F8E4M3 {
            return Ok(stored.to_dtype(dtype)?);
        }
        let scale_name = scale_name(name);
        let scale = self.tensor(&scale_name, device)?.to_dtype(DType::F32)?;
        let &[n, k] = stored.dims() else {
            return Err(Error::TensorShape {
                tensor: name.to_string(),
                got: stored.dims().to_vec(),
                expected: "two dimensions for an FP8 weight".into(),
            });
        };
        let granularity = scale_granularity(&scale, n, k, &scale_name)?;
        Ok(
            Fp8Tensor::from_f8e4m3(&stored, granularity, Contraction::Cols, scale)?
                .dequantize(dtype)?,
        )
    }

    /// A VarBuilder over this checkpoint; other tensors than FP8 weights are cast to `dtype`.
    pub fn var_builder(self, dtype: DType, device: &Device) -> VarBuilder<'static> {
        VarBuilder::from_backend(Box::new(Backend(self)), dtype, device.clone())
    }
}

/// Opens safetensors files as a VarBuilder: see [`Checkpoint`].
pub fn var_builder<P: AsRef<Path>>(
    paths: &[P],
    dtype: DType,
    device: &Device,
) -> Result<VarBuilder<'static>> {
    Ok(Checkpoint::open(paths)?.var_builder(dtype, device))
}

/// Where compressed-tensors keeps the dequant_scale of a weight.
fn scale_name(weight: &str) -> String {
    format!("{weight}_scale")
}

fn wrong_dtype(name: &str, got: Option<Dtype>, expected: &str) -> Error {
    Error::TensorDType {
        tensor: name.to_string(),
        got: got.map_or("missing".into(), |got| format!("{got:?}")),
        expected: expected.into(),
    }
}

/// Which elements of an `[n, k]` weight share a scale, told by the shape of the scale tensor.
pub(crate) fn scale_granularity(
    scale: &Tensor,
    n: usize,
    k: usize,
    name: &str,
) -> Result<Granularity> {
    const BLOCK: usize = 128;
    match *scale.dims() {
        [] | [1] | [1, 1] => Ok(Granularity::Tensorwise),
        [rows] | [rows, 1] if rows == n => Ok(Granularity::Rowwise),
        [rows, cols] if rows == n.div_ceil(BLOCK) && cols == k.div_ceil(BLOCK) => {
            Ok(Granularity::Blockwise {
                rows: BLOCK,
                cols: BLOCK,
            })
        }
        _ => Err(Error::TensorShape {
            tensor: name.to_string(),
            got: scale.dims().to_vec(),
            expected: format!("[1], [{n}, 1] or blocks of {BLOCK} for a weight of [{n}, {k}]"),
        }),
    }
}

struct Backend(Checkpoint);

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.get_unchecked(name, dtype, device)?;
        if tensor.shape() != &shape {
            return Err(Error::TensorShape {
                tensor: name.to_string(),
                got: tensor.dims().to_vec(),
                expected: format!("{:?}", shape.dims()),
            }
            .into());
        }
        Ok(tensor)
    }

    fn get_unchecked(&self, name: &str, dtype: DType, dev: &Device) -> candle_core::Result<Tensor> {
        Ok(self.0.value(name, dtype, dev)?)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        name.ends_with(CHECKED) || self.0.index.contains_key(name)
    }
}
