//! Values: codes, scales as f32 numbers, and weights dequantized.

use super::Checkpoint;
use super::catalogue::{Value, Weight};
use super::files::Stored;
use crate::check::is_float;
use crate::error::{Error, Result};
use crate::names::{join, split, weight_name};
use crate::scheme::{InputScheme, LayerScheme};
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Fp8Tensor, InputScaling};
use fp8_core::{Contraction, Format, Granularity};
use safetensors::Dtype;

/// An FP8 layer of a checkpoint of any family.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::Device;
/// use fp8::load::Checkpoint;
/// use fp8::nn::InputScaling;
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::fp8_model(dir.path());
/// let checkpoint = Checkpoint::open_dir(dir.path())?;
/// let layer = checkpoint.stored_layer("fc", &Device::Cpu)?;
/// assert_eq!(layer.codes.dims(), [32, 64]);
/// assert_eq!(layer.codes.dequant_scale().elem_count(), 32); // one per output feature
/// assert!(matches!(layer.input, InputScaling::DynamicPerToken { .. }));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StoredLayer {
    /// Canonical path.
    pub path: String,
    /// E4M3 `[N, K]`, scales along K; dequant_scale f32, of the numbers in the file.
    pub codes: Fp8Tensor,
    /// How its inputs are scaled.
    pub input: InputScaling,
}

impl Checkpoint {
    /// The FP8 layer at a canonical path, on `device`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if there is no FP8 layer at `path`; [`Error::TensorValue`] for a code of NaN and for a scale that is not
    /// finite and positive; and if a tensor cannot be read.
    pub fn stored_layer(&self, path: &str, device: &Device) -> Result<StoredLayer> {
        let name = weight_name(path);
        let weights = &self.catalogue.weights;
        let weight = weights.get(&name).ok_or_else(|| self.missing(&name))?;
        let input = weight.scheme.input.with_scale(|()| match &weight.input {
            Some(stored) => self.files.input_scale(stored, device),
            None => Err(self.missing(&join(path, "input_scale"))),
        })?;
        Ok(StoredLayer {
            path: path.to_string(),
            codes: self.files.fp8_tensor(weight, device)?,
            input,
        })
    }

    /// The codes and scales of the weight `name`, if it is stored as E4M3 with scales of this granularity. FP4 is not.
    pub(crate) fn codes(&self, name: &str, granularity: Granularity) -> Result<Option<Fp8Tensor>> {
        match self.catalogue.weights.get(name) {
            Some(weight) if !weight.fp4 && weight.scheme.weight == granularity => {
                Ok(Some(self.files.fp8_tensor(weight, &Device::Cpu)?))
            }
            _ => Ok(None),
        }
    }

    /// A tensor by its canonical name or, for scales, by its stored one: codes as F8E4M3, scales of caches as f32, everything
    /// else as stored.
    ///
    /// # Errors
    /// If no tensor has that name, it cannot be read, or candle does not have its dtype.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        if let Some(weight) = self.catalogue.weights.get(name) {
            let (codes, shape) = (self.files.codes(weight)?, &weight.shape);
            let tensor = Tensor::from_raw_buffer(&codes, DType::F8E4M3, shape, device)?;
            return Ok(tensor);
        }
        match (self.catalogue.values.get(name), self.files.index.get(name)) {
            (Some(Value::CacheScale { .. }), _) => self.value(name, DType::F32, device),
            (Some(value), _) => self.files.tensor(value.stored(), device),
            (None, Some(&file)) => self.files.files[file].tensor(name, device),
            (None, None) => Err(self.missing(name)),
        }
    }

    pub(super) fn missing(&self, name: &str) -> Error {
        const SHOWN: usize = 3;
        let files = self.files.files.iter();
        let paths = files.map(|file| file.path().display().to_string());
        let mut shown: Vec<String> = paths.collect();
        if shown.len() > SHOWN {
            let more = format!("{} more files", shown.len() - SHOWN);
            shown.truncate(SHOWN);
            shown.push(more);
        }
        Error::MissingTensor {
            tensor: name.to_string(),
            place: shown.join(", "),
        }
    }

    /// The canonical name that `name` stands for; None if the checkpoint has no such tensor.
    pub(super) fn resolve(&self, name: &str) -> Option<String> {
        if self.has(name) {
            return Some(name.to_string());
        }
        let (path, own) = split(name);
        // A tied weight has the scales of the weight that is stored.
        let tied = match own {
            "weight_scale" | "input_scale" => {
                let weight = self.tied.get(&weight_name(path))?;
                join(split(weight).0, own)
            }
            _ => self.tied.get(name)?.clone(),
        };
        self.has(&tied).then_some(tied)
    }

    fn has(&self, name: &str) -> bool {
        self.catalogue.weights.contains_key(name)
            || self.catalogue.values.contains_key(name)
            || self.scale_owner(name).is_some()
            || self.files.index.contains_key(name)
    }

    /// The weight whose canonical scale is `name`, with the stored tensor if it is the scale of the inputs.
    fn scale_owner(&self, name: &str) -> Option<(&Weight, Option<&Stored>)> {
        let weights = &self.catalogue.weights;
        if let (path, "input_scale") = split(name) {
            let weight = weights.get(&weight_name(path))?;
            return Some((weight, Some(weight.input.as_ref()?)));
        }
        Some((weights.get(name.strip_suffix("_scale")?)?, None))
    }

    /// How the layer at `path` is stored, or what the configuration declares for a layer in high precision; None where it declares
    /// no granularity.
    pub(super) fn scheme(&self, path: &str) -> Result<Option<LayerScheme>> {
        let Some(name) = self.resolve(&weight_name(path)) else {
            return Ok(None);
        };
        if let Some(weight) = self.catalogue.weights.get(&name) {
            return Ok(Some(weight.scheme));
        }
        let Some(value) = self.catalogue.values.get(&name) else {
            return Ok(None);
        };
        let family = self.files.family(value.stored());
        let declared = (family.layer)(split(&name).0)?;
        Ok(declared.and_then(|declared| {
            let weight = declared.weight?;
            let input = declared.input.unwrap_or(InputScheme::None);
            Some(LayerScheme { weight, input })
        }))
    }

    /// A tensor for a model that asks for `dtype`: the dequantized value of an FP8 weight, its codes for U8; scales as f32
    /// numbers; any other tensor in `dtype`.
    pub(crate) fn value(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let name = self.resolve(name).ok_or_else(|| self.missing(name))?;
        let check_float = || match is_float(dtype) {
            true => Ok(()),
            false => Err(Error::BuilderDType { got: dtype }),
        };
        let files = &self.files;
        if let Some(weight) = self.catalogue.weights.get(&name) {
            return match dtype {
                DType::U8 => Ok(Tensor::from_vec(
                    files.codes(weight)?,
                    &weight.shape,
                    device,
                )?),
                DType::F8E4M3 => self.tensor(&name, device),
                _ => {
                    check_float()?;
                    Ok(files.fp8_tensor(weight, device)?.dequantize(dtype)?)
                }
            };
        }
        if let Some((weight, input)) = self.scale_owner(&name) {
            check_float()?;
            let scale = match input {
                Some(stored) => files.input_scale(stored, device)?,
                None => files.scales(weight, device)?,
            };
            return Ok(scale.to_dtype(dtype)?);
        }
        let tensor = match self.catalogue.values.get(&name) {
            Some(Value::CacheScale { stored, shape }) => {
                let scales = files.tensor(stored, &Device::Cpu)?;
                let scales = scales.to_dtype(DType::F32)?.flatten_all()?.to_vec1()?;
                files.check_scales(stored, &scales)?;
                Tensor::from_vec(scales, shape.as_slice(), device)?
            }
            Some(Value::Codes(stored)) => {
                check_float()?;
                return self.decoded(stored, dtype, device);
            }
            Some(Value::Tensor(stored)) => files.tensor(stored, device)?,
            None => self.tensor(&name, device)?,
        };
        if tensor.dtype() == dtype {
            return Ok(tensor);
        }
        // An integer dtype would round the value.
        if is_float(tensor.dtype()) && !is_float(dtype) {
            return Err(Error::TensorDType {
                tensor: name,
                got: tensor.dtype().as_str().into(),
                expected: format!("{}, which was asked for", dtype.as_str()),
            });
        }
        Ok(tensor.to_dtype(dtype)?)
    }

    /// The values of FP8 codes without scales.
    fn decoded(&self, stored: &Stored, dtype: DType, device: &Device) -> Result<Tensor> {
        let format = match self.files.dtype(stored) {
            Some(Dtype::F8_E5M2) => Format::E5M2,
            _ => Format::E4M3,
        };
        let bytes = self.files.file(stored).bytes(&stored.name)?;
        let codes = Tensor::from_vec(bytes, self.files.shape(stored), device)?;
        let one = Tensor::ones(1, DType::F32, device)?;
        let (granularity, contraction) = (Granularity::Tensorwise, Contraction::Cols);
        let codes = Fp8Tensor::from_parts(codes, format, granularity, contraction, one)?;
        Ok(codes.dequantize(dtype)?)
    }
}
