//! Scaled tensors in safetensors files.
//!
//! Data are stored under the name of the tensor, its scale under `{name}.data_scale`: f32 `[1]`, or the E8M0 code, U8 `[1]`. (FP8
//! checkpoints use other names, such as `weight_scale`, so neither kind of file is mistaken for the other.) FP8 data are U8, with their
//! format in the metadata. The metadata has `format: scaled`.

use super::error::{Error, Result, tensor_dtype, tensor_shape};
use super::tree::{ScaledTree, with_scale};
use super::value::Scaled;
use candle_core::{DType, Device, Tensor};
use fp8_core::scaled::Scale;
use fp8_core::{E8M0, Format};
use fp8_files::Error as FilesError;
use fp8_files::atomic::write_safetensors_atomic;
use fp8_files::{FORMAT_KEY, SCALED_FORMAT, SafetensorsFile};
use std::collections::{BTreeMap, HashMap};
use std::path::Path;

const SUFFIX: &str = ".data_scale";
/// Metadata of a training checkpoint: the state that is not in tensors.
pub const TRAINING_KEY: &str = "scaled_training";
/// Prefix of the optimizer's tensors in a training checkpoint.
pub const OPTIMIZER_PREFIX: &str = "optimizer/";
/// Metadata: the formats of FP8 data by name.
const FP8_KEY: &str = "fp8_data";

/// How [`save`] stores scales.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScaleStorage {
    /// f32, which represents every scale.
    #[default]
    F32,
    /// The codes of microscaling formats, powers of two. A tensor of zero scale is stored as zeros of the scale 1.
    E8M0,
}

/// The contents of a safetensors file for a [`ScaledTree`], to be written together with other tensors.
#[derive(Debug, Clone)]
pub struct StoredTree {
    /// Data and scales by their names in the file.
    pub tensors: BTreeMap<String, Tensor>,
    /// The metadata of the file.
    pub metadata: HashMap<String, String>,
}

fn scale_tensor(path: &Path, name: &str, scale: Scale, storage: ScaleStorage) -> Result<Tensor> {
    let code = match storage {
        ScaleStorage::F32 => return Ok(Tensor::new(&[scale.to_f32()], &Device::Cpu)?),
        ScaleStorage::E8M0 if scale.is_zero() => E8M0::from_f32(1.0),
        ScaleStorage::E8M0 => scale.to_e8m0().map_err(|_| Error::DataScale {
            path: path.to_path_buf(),
            tensor: name.to_string(),
            value: scale.to_f32(),
            expected: "a power of two, as E8M0 has them",
        })?,
    };
    Ok(Tensor::new(&[code.to_bits()], &Device::Cpu)?)
}

/// The tensors and metadata for `tree`; `path` names the file in errors.
///
/// # Errors
/// [`FilesError::NameClash`](fp8_files::Error::NameClash) and [`Error::DataScale`], as [`save`].
pub fn stored(path: &Path, tree: &ScaledTree, storage: ScaleStorage) -> Result<StoredTree> {
    let (mut tensors, mut formats) = (BTreeMap::new(), BTreeMap::new());
    let mut put = |name: String, tensor: Tensor| match tensors.insert(name.clone(), tensor) {
        None => Ok(()),
        Some(_) => Err(FilesError::NameClash { tensor: name }),
    };
    for (name, value) in tree.iter() {
        let data = match value.codes() {
            Some(codes) => {
                formats.insert(name, codes.format().to_string());
                codes.codes().clone()
            }
            None => value.data()?,
        };
        let data = match value.scale().is_zero() {
            true => data.zeros_like()?,
            false => data,
        };
        put(name.to_string(), data)?;
        let scale = scale_tensor(path, name, value.scale(), storage)?;
        put(format!("{name}{SUFFIX}"), scale)?;
    }
    let mut metadata = HashMap::from([(FORMAT_KEY.to_string(), SCALED_FORMAT.to_string())]);
    if !formats.is_empty() {
        let formats =
            serde_json::to_string(&formats).map_err(|error| formats_error(path, &error))?;
        metadata.insert(FP8_KEY.to_string(), formats);
    }
    Ok(StoredTree { tensors, metadata })
}

/// Writes the values of `tree` to `path`, replacing the file as a whole or not at all: data under their names, scales under
/// `{name}.data_scale`.
///
/// # Errors
/// [`FilesError::Write`](fp8_files::Error::Write); [`FilesError::NameClash`](fp8_files::Error::NameClash) if a tensor has the name of
/// another's scale; [`Error::DataScale`] for a scale that E8M0 cannot represent.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::{ScaleStorage, ScaledTree, load, save};
/// # let dir = tempfile::tempdir()?;
/// # let path = dir.path().join("scaled.safetensors");
/// let w = [("w".to_string(), Tensor::new(&[3f32, 6.0], &Device::Cpu)?)];
/// let tree = ScaledTree::as_scaled(w, 2.0)?;
/// save(&path, &tree, ScaleStorage::E8M0)?;
/// let back = load(&path, &Device::Cpu)?;
/// assert_eq!(back.get("w").unwrap().scale().to_f32(), 2.0);
/// assert_eq!(back.to_tensors(DType::F32)?["w"].to_vec1::<f32>()?, [3.0, 6.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn save(path: impl AsRef<Path>, tree: &ScaledTree, storage: ScaleStorage) -> Result<()> {
    let path = path.as_ref();
    let StoredTree { tensors, metadata } = stored(path, tree, storage)?;
    write_safetensors_atomic(path, &tensors, Some(&metadata)).map_err(FilesError::from)?;
    Ok(())
}

/// The scaled tensors of a file that [`save`] or `save_training` has written; the other tensors of a training checkpoint are skipped.
///
/// # Errors
/// If the file cannot be read, is not a safetensors file or has no scaled tensors
/// ([`FilesError::ForeignFormat`](fp8_files::Error::ForeignFormat)); [`Error::ScaledPair`],
/// [`Error::DataScale`], [`FilesError::TensorDType`](fp8_files::Error::TensorDType) or
/// [`FilesError::TensorShape`](fp8_files::Error::TensorShape), naming the tensor.
pub fn load(path: impl AsRef<Path>, device: &Device) -> Result<ScaledTree> {
    let file = SafetensorsFile::open(path.as_ref())?;
    let training = file.metadata(TRAINING_KEY).is_some();
    take(&file, device, |name| {
        !(training && name.starts_with(OPTIMIZER_PREFIX))
    })
}

/// The scaled tensors of a file whose names are `wanted`.
///
/// # Errors
/// As [`load`].
pub fn take(
    file: &SafetensorsFile,
    device: &Device,
    wanted: impl Fn(&str) -> bool,
) -> Result<ScaledTree> {
    let path = file.path().to_path_buf();
    if !file.is_scaled() {
        return Err(FilesError::ForeignFormat {
            path,
            tensor: file.names().next().unwrap_or_default(),
            format: format!("{:?}", file.metadata(FORMAT_KEY).unwrap_or("no format")),
        }
        .into());
    }
    let formats = formats(file)?;
    let pair_of = |tensor: &str, missing: String| Error::ScaledPair {
        path: path.clone(),
        tensor: tensor.to_string(),
        missing,
    };
    let names: Vec<String> = file.names().filter(|name| wanted(name)).collect();
    let mut tree = ScaledTree::default();
    for name in &names {
        let scale_name = format!("{name}{SUFFIX}");
        match name.strip_suffix(SUFFIX) {
            // The scale of another tensor, unless it has a scale itself.
            Some(data) if file.dtype(&scale_name).is_none() => {
                if file.dtype(data).is_none() {
                    return Err(pair_of(name, data.to_string()));
                }
            }
            _ if file.dtype(&scale_name).is_none() => return Err(pair_of(name, scale_name)),
            _ => {
                let scale = read_scale(file, name, &scale_name)?;
                let data = file.tensor(name, device)?;
                let value = read_value(name, &data, scale, formats.get(name));
                let value = value.map_err(|error| match error {
                    Error::Scaled(_) => Error::DataScale {
                        path: path.clone(),
                        tensor: name.clone(),
                        value: scale.to_f32(),
                        expected: "0 or a power of two, unless the check of scales is lenient",
                    },
                    error => error,
                })?;
                tree.insert(name.as_str(), value);
            }
        }
    }
    Ok(tree)
}

fn formats(file: &SafetensorsFile) -> Result<BTreeMap<String, Format>> {
    let Some(text) = file.metadata(FP8_KEY) else {
        return Ok(BTreeMap::new());
    };
    let names: BTreeMap<String, String> =
        serde_json::from_str(text).map_err(|error| formats_error(file.path(), &error))?;
    let known = |format: &str| {
        let formats = [Format::E4M3, Format::E5M2];
        formats
            .into_iter()
            .find(|known| known.to_string() == format)
    };
    let format = |(name, format): (String, String)| match known(&format) {
        Some(known) => Ok((name, known)),
        None => {
            let reason = format!("`{name}` has the format {format}");
            Err(formats_error(file.path(), &reason))
        }
    };
    names.into_iter().map(format).collect()
}

fn formats_error(path: &Path, reason: &dyn std::fmt::Display) -> Error {
    Error::Files(FilesError::Json {
        path: path.to_path_buf(),
        what: "the formats of FP8 data",
        reason: reason.to_string(),
    })
}

fn read_value(name: &str, data: &Tensor, scale: Scale, format: Option<&Format>) -> Result<Scaled> {
    match (data.dtype(), format) {
        (DType::U8, Some(format)) if scale.is_zero() => {
            Ok(Scaled::zeros(data.shape(), DType::F16, data.device())?.astype(*format)?)
        }
        (DType::U8, Some(format)) => Ok(Scaled::from_codes(data, *format, scale.to_f32())?),
        (DType::F16 | DType::BF16 | DType::F32 | DType::F64, None) => match scale.is_zero() {
            true => with_scale(data, scale),
            false => Ok(Scaled::from_parts(data, scale.to_f32())?),
        },
        (got, _) => {
            let expected = "f16, bf16, f32 or f64, or u8 with an FP8 format in the metadata";
            Err(tensor_dtype(name, got.as_str(), expected))
        }
    }
}

fn read_scale(file: &SafetensorsFile, data: &str, name: &str) -> Result<Scale> {
    let tensor = file.tensor(name, &Device::Cpu)?;
    if tensor.dims() != [1] {
        return Err(tensor_shape(name, tensor.dims(), "[1], one scale"));
    }
    let (value, scale) = match tensor.dtype() {
        DType::F32 => {
            let value = tensor.get(0)?.to_scalar::<f32>()?;
            // Files written under a lenient check have scales that are not powers of two.
            (value, Scale::lenient(value).ok())
        }
        DType::U8 => {
            let code = E8M0::from_bits(tensor.get(0)?.to_scalar::<u8>()?);
            // The least code is below the range of scales.
            let scale = Scale::from_e8m0(code).ok().filter(|(_, rest)| *rest == 1.0);
            (code.to_f32(), scale.map(|(scale, _)| scale))
        }
        got => {
            return Err(tensor_dtype(name, got.as_str(), "f32, or u8 for E8M0"));
        }
    };
    scale.ok_or_else(|| Error::DataScale {
        path: file.path().to_path_buf(),
        tensor: data.to_string(),
        value,
        expected: "a finite number from 0 up (E8M0: a power of two from 2^-126 on)",
    })
}
