//! Values: codes, scales as f32 numbers, and weights dequantized.

use super::Checkpoint;
use super::catalogue::{Stored, Value, Weight};
use super::family::Order;
use super::layout::{rotary_rows, take_rows};
use crate::check::is_float;
use crate::error::{Error, Result};
use crate::names::{join, split, weight_name};
use crate::scheme::LayerScheme;
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_candle::InputScaling;
use fp8_core::{Contraction, Format, Granularity};
use safetensors::Dtype;

/// An FP8 layer of a checkpoint in the one form that all families are brought into.
///
/// ```
/// # use fp8_recipes as fp8;
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
/// # let checkpoint = Checkpoint::open_dir(&fp8)?;
/// use fp8::nn::InputScaling;
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
    /// What becomes of its inputs.
    pub input: InputScaling,
}

impl Checkpoint {
    /// The FP8 layer at a canonical path, on `device`.
    ///
    /// # Errors
    /// [`Error::MissingTensor`] if there is no FP8 layer at `path`; if it cannot be read; [`Error::TensorValue`] for a code of
    /// NaN and for a scale that is not finite and positive.
    pub fn stored_layer(&self, path: &str, device: &Device) -> Result<StoredLayer> {
        let name = weight_name(path);
        let Some(weight) = self.catalogue.weights.get(&name) else {
            return Err(self.missing(&name));
        };
        let input = self.input_scaling(path, weight, device)?;
        Ok(StoredLayer {
            path: path.to_string(),
            codes: self.fp8_tensor(weight, device)?,
            input,
        })
    }

    fn input_scaling(&self, path: &str, weight: &Weight, device: &Device) -> Result<InputScaling> {
        let static_scale = || self.input_scale(path, weight, device);
        weight
            .input_scheme
            .scaling(weight.power_of_two_inputs, weight.amax_bound, static_scale)
    }

    /// A tensor by its canonical name or, for scales, by its stored one: codes as F8E4M3, scales of caches as f32, everything
    /// else as stored.
    ///
    /// # Errors
    /// If there is none of that name, it cannot be read, or candle has no such dtype.
    pub fn tensor(&self, name: &str, device: &Device) -> Result<Tensor> {
        if let Some(weight) = self.catalogue.weights.get(name) {
            let codes = self.codes(weight)?;
            let shape = weight.shape.as_slice();
            return Ok(Tensor::from_raw_buffer(
                &codes,
                DType::F8E4M3,
                shape,
                device,
            )?);
        }
        match (self.catalogue.values.get(name), self.index.get(name)) {
            (Some(Value::CacheScale { .. }), _) => self.value(name, DType::F32, device),
            (Some(value), _) => self.stored_tensor(value.stored(), device),
            (None, Some(&file)) => self.files[file].tensor(name, device),
            (None, None) => Err(self.missing(name)),
        }
    }

    pub(super) fn missing(&self, name: &str) -> Error {
        const SHOWN: usize = 3;
        let files = self
            .files
            .iter()
            .map(|file| file.path().display().to_string());
        let mut shown: Vec<String> = files.take(SHOWN).collect();
        if self.files.len() > SHOWN {
            shown.push(format!("{} more files", self.files.len() - SHOWN));
        }
        Error::MissingTensor {
            tensor: name.to_string(),
            place: shown.join(", "),
        }
    }

    /// A tensor as stored, its rows in the model's order.
    fn stored_tensor(&self, stored: &Stored, device: &Device) -> Result<Tensor> {
        let tensor = self.files[stored.file].tensor(&stored.name, device)?;
        let Order::Rotary { heads } = stored.order else {
            return Ok(tensor);
        };
        let rows = tensor.dims().first().copied().unwrap_or_default();
        // One number for all rows, or nothing.
        if rows == 1 || tensor.rank() == 0 || tensor.elem_count() == 0 {
            return Ok(tensor);
        }
        let rows: Vec<u32> = rotary_rows(rows, heads, stored)?
            .into_iter()
            .map(|row| row as u32)
            .collect();
        let rows = Tensor::new(rows, device)?;
        Ok(tensor.index_select(&rows, 0)?)
    }

    /// The canonical name that `name` stands for; None if the checkpoint has no such tensor.
    pub(super) fn resolve(&self, name: &str) -> Option<String> {
        if self.knows(name) {
            return Some(name.to_string());
        }
        let (path, own) = split(name);
        // The scales of a tied weight are those of the one that is stored.
        let tied = match own {
            "weight_scale" | "input_scale" => {
                let weight = self.tied.get(&weight_name(path))?;
                join(split(weight).0, own)
            }
            _ => self.tied.get(name)?.clone(),
        };
        self.knows(&tied).then_some(tied)
    }

    fn knows(&self, name: &str) -> bool {
        let catalogue = &self.catalogue;
        if catalogue.weights.contains_key(name) || catalogue.values.contains_key(name) {
            return true;
        }
        self.scale_owner(name).is_some() || self.index.contains_key(name)
    }

    /// The weight of which `name` is the canonical scale, and whether it is that of the inputs.
    fn scale_owner(&self, name: &str) -> Option<(&Weight, bool)> {
        let weights = &self.catalogue.weights;
        if let (path, "input_scale") = split(name) {
            let weight = weights.get(&weight_name(path))?;
            return weight.input.is_some().then_some((weight, true));
        }
        let weight = weights.get(name.strip_suffix("_scale")?)?;
        Some((weight, false))
    }

    /// How the layer at `path` is stored; None if the configuration does not want it in FP8.
    pub(super) fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        let Some(name) = self.resolve(&weight_name(path)) else {
            return Ok(None);
        };
        if let Some(weight) = self.catalogue.weights.get(&name) {
            return Ok(Some(weight.scheme()));
        }
        match self.catalogue.values.get(&name) {
            Some(value) => self.families[value.stored().file].layer(split(&name).0),
            None => Ok(None),
        }
    }

    /// A tensor for a model that asks for `dtype`: the dequantized value of an FP8 weight, its codes for U8; scales as f32
    /// numbers; any other tensor in `dtype`.
    pub(super) fn value(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(name) = self.resolve(name) else {
            return Err(self.missing(name));
        };
        if let Some(weight) = self.catalogue.weights.get(&name) {
            return match dtype {
                DType::U8 => self.code_tensor(weight, device),
                DType::F8E4M3 => self.tensor(&name, device),
                dtype if is_float(dtype) => {
                    Ok(self.fp8_tensor(weight, device)?.dequantize(dtype)?)
                }
                got => Err(Error::BuilderDType { got }),
            };
        }
        if let Some((weight, is_input)) = self.scale_owner(&name) {
            if !is_float(dtype) {
                return Err(Error::BuilderDType { got: dtype });
            }
            let scale = match is_input {
                true => self.input_scale(split(&name).0, weight, device)?,
                false => self.scales(weight, device)?,
            };
            return Ok(scale.to_dtype(dtype)?);
        }
        let tensor = match self.catalogue.values.get(&name) {
            Some(Value::CacheScale { stored, shape }) => {
                let scale = self
                    .stored_tensor(stored, &Device::Cpu)?
                    .to_dtype(DType::F32)?;
                self.check_scales(stored, &scale.flatten_all()?.to_vec1()?)?;
                scale.reshape(shape.as_slice())?.to_device(device)?
            }
            Some(Value::Codes(stored)) => return self.decoded(stored, dtype, device),
            Some(Value::Tensor(stored)) => self.stored_tensor(stored, device)?,
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

    /// FP8 codes without scales: their values.
    fn decoded(&self, stored: &Stored, dtype: DType, device: &Device) -> Result<Tensor> {
        if !is_float(dtype) {
            return Err(Error::BuilderDType { got: dtype });
        }
        let file = &self.files[stored.file];
        let format = match file.dtype(&stored.name) {
            Some(Dtype::F8_E5M2) => Format::E5M2,
            _ => Format::E4M3,
        };
        let shape = file.shape(&stored.name).unwrap_or_default();
        let codes = Tensor::from_vec(file.bytes(&stored.name)?, shape, device)?;
        let one = Tensor::ones(1, DType::F32, device)?;
        let (granularity, contraction) = (Granularity::Tensorwise, Contraction::Cols);
        let codes = Fp8Tensor::from_parts(codes, format, granularity, contraction, one)?;
        Ok(codes.dequantize(dtype)?)
    }

    fn fp8_tensor(&self, weight: &Weight, device: &Device) -> Result<Fp8Tensor> {
        let codes = self.code_tensor(weight, device)?;
        let scales = self.scales(weight, device)?;
        let (granularity, contraction) = (weight.granularity, Contraction::Cols);
        Ok(Fp8Tensor::from_parts(
            codes,
            Format::E4M3,
            granularity,
            contraction,
            scales,
        )?)
    }

    fn code_tensor(&self, weight: &Weight, device: &Device) -> Result<Tensor> {
        let shape = weight.shape.as_slice();
        Ok(Tensor::from_vec(self.codes(weight)?, shape, device)?)
    }

    /// Row-major codes, none of them NaN.
    pub(super) fn codes(&self, weight: &Weight) -> Result<Vec<u8>> {
        let stored = &weight.codes;
        // The first code of a word is its lowest byte, and words are little-endian: so their bytes are the codes.
        let mut codes = self.files[stored.file].bytes(&stored.name)?;
        if let Order::Rotary { heads } = stored.order {
            codes = take_rows(&codes, weight.shape[0], heads, stored)?;
        }
        match codes.iter().position(|code| code & 0x7F == 0x7F) {
            None => Ok(codes),
            Some(index) => Err(Error::TensorValue {
                tensor: stored.name.clone(),
                index,
                value: f64::NAN,
                expected: format!("a finite value, as every weight, in {}", self.path(stored)),
            }),
        }
    }
}
