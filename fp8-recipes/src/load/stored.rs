//! From canonical names to what a family stores under its own, and the checks that every weight has its scale and
//! every scale its weight.

use super::Checkpoint;
use super::family::Family;
use super::scheme::{InputScheme, LayerScheme, granularity_by_shape, has_shape, shapes_text};
use crate::check::{check_mx_scale_values, check_scale_values, is_float};
use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use fp8_candle::Fp8Tensor;
use fp8_core::{Contraction, E8M0, Granularity};
use safetensors::Dtype;
use std::path::{Path, PathBuf};

/// Dtypes of scales that are numbers.
const FLOATS: [Dtype; 3] = [Dtype::F32, Dtype::BF16, Dtype::F16];
const FLOATS_TEXT: &str = "F32, BF16 or F16";

impl Checkpoint {
    /// The family of the file that holds `name`.
    fn family(&self, name: &str) -> Option<&dyn Family> {
        Some(self.families[*self.index.get(name)?].as_ref())
    }

    /// How the layer at `path` is stored; None if it is not in FP8.
    pub(super) fn layer(&self, path: &str) -> Result<Option<LayerScheme>> {
        let Some(family) = self.family(&weight_name(path)) else {
            return Ok(None);
        };
        let mut scheme = family.layer(path)?;
        if let Some(scheme) = &mut scheme {
            scheme.power_of_two_inputs |= self.power_of_two_inputs.contains(path);
        }
        Ok(scheme)
    }

    /// The stored name behind a canonical one: `X.weight`, `X.weight_scale`, `X.input_scale`, or any other.
    pub(super) fn stored_name(&self, name: &str) -> Option<String> {
        if self.index.contains_key(name) {
            return Some(name.to_string());
        }
        let (path, own) = split(name);
        if own == "weight_scale" || own == "input_scale" {
            let family = self.family(&weight_name(path))?;
            let names = match own {
                "weight_scale" => family.weight_scale_names(),
                _ => family.input_scale_names(),
            };
            let mut names = names.iter().map(|name| join(path, name));
            return names.find(|name| self.index.contains_key(name));
        }
        self.tied.get(name).cloned()
    }

    /// Every FP8 weight has its scale, every scale its weight, and the configuration says so too.
    pub(super) fn check(&self) -> Result<()> {
        for name in self.names() {
            match self.dtype(name) {
                Some(Dtype::F8_E4M3 | Dtype::F8_E5M2) => self.check_weight(name)?,
                _ => self.check_other(name)?,
            }
        }
        Ok(())
    }

    /// A tensor that is a scale by its name stands beside an FP8 weight and has a dtype for scales.
    fn check_other(&self, name: &str) -> Result<()> {
        let (path, own) = split(name);
        let Some(family) = self.family(name) else {
            return Ok(());
        };
        if !family.weight_scale_names().contains(&own) {
            return Ok(());
        }
        let weight = weight_name(path);
        if self.dtype(&weight) != Some(Dtype::F8_E4M3) {
            return Err(wrong_dtype(&weight, self.dtype(&weight), "F8_E4M3"));
        }
        let granularity = family.layer(path)?.and_then(|scheme| scheme.weight);
        let (allowed, text): (&[Dtype], _) = match granularity {
            Some(Granularity::Mx) => (&[Dtype::U8, Dtype::F8_E8M0], "U8 or F8_E8M0"),
            _ => (&FLOATS, FLOATS_TEXT),
        };
        match self.dtype(name) {
            Some(dtype) if allowed.contains(&dtype) => Ok(()),
            dtype => Err(wrong_dtype(name, dtype, text)),
        }
    }

    fn check_weight(&self, name: &str) -> Result<()> {
        let Some(family) = self.family(name) else {
            return Ok(());
        };
        let (path, own) = split(name);
        if own != "weight" {
            // Not a linear layer's, so no configuration speaks of it.
            let scale = self.scale_of(name)?;
            return self.granularity(name, &scale, None).map(|_| ());
        }
        let Some(scheme) = family.layer(path)? else {
            return Err(mismatch(
                path,
                family,
                "leaves it in high precision",
                format!("`{name}` holds FP8 values"),
            ));
        };
        let scale = self.scale_of(name)?;
        if self.dtype(name) != Some(Dtype::F8_E4M3) {
            return Err(wrong_dtype(name, self.dtype(name), "F8_E4M3"));
        }
        self.granularity(name, &scale, scheme.weight)?;
        let input = self.stored_name(&join(path, "input_scale"));
        match (scheme.input, &input) {
            (Some(InputScheme::Static), None) => {
                return Err(Error::MissingTensor {
                    tensor: join(path, "input_scale"),
                    place: family
                        .source()
                        .map(|path| {
                            format!("the checkpoint, whose {} says static,", path.display())
                        })
                        .unwrap_or_default(),
                });
            }
            (Some(scheme), Some(name)) if scheme != InputScheme::Static => {
                let says = "gives its inputs no static scale";
                return Err(mismatch(path, family, says, format!("there is `{name}`")));
            }
            _ => {}
        }
        match input.map(|name| (self.dtype(&name), name)) {
            Some((dtype, name)) if !dtype.is_some_and(|dtype| FLOATS.contains(&dtype)) => {
                Err(wrong_dtype(&name, dtype, FLOATS_TEXT))
            }
            _ => Ok(()),
        }
    }

    /// Stored name of the scale of an FP8 weight.
    pub(super) fn scale_of(&self, weight: &str) -> Result<String> {
        let canonical = format!("{weight}_scale");
        self.stored_name(&canonical)
            .ok_or_else(|| Error::MissingScale {
                tensor: weight.to_string(),
                missing: canonical,
            })
    }

    /// Which elements of an FP8 weight share a scale, held against the shapes in the file.
    fn granularity(
        &self,
        weight: &str,
        scale: &str,
        told: Option<Granularity>,
    ) -> Result<Granularity> {
        let shape = self.shape(weight).unwrap_or_default();
        let &[n, k] = shape else {
            return Err(Error::TensorShape {
                tensor: weight.to_string(),
                got: shape.to_vec(),
                expected: "two dimensions for an FP8 weight".into(),
            });
        };
        let shape = self.shape(scale).unwrap_or_default();
        let found = match told {
            Some(told) => Some(told).filter(|told| has_shape(shape, *told, n, k)),
            None => granularity_by_shape(shape, n, k),
        };
        found.ok_or_else(|| Error::TensorShape {
            tensor: scale.to_string(),
            got: shape.to_vec(),
            expected: shapes_text(told, n, k),
        })
    }

    /// The dequantized value of an FP8 weight in `dtype`; scales as f32 numbers; any other tensor in `dtype`.
    pub(super) fn value(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        let Some(stored_name) = self.stored_name(name) else {
            return self.tensor(name, device);
        };
        let (path, own) = split(name);
        if own == "weight_scale" && self.dtype(&weight_name(path)) == Some(Dtype::F8_E4M3) {
            if !is_float(dtype) {
                return Err(Error::BuilderDType { got: dtype });
            }
            return Ok(self.scale_values(&stored_name, device)?.to_dtype(dtype)?);
        }
        let stored = self.tensor(&stored_name, device)?;
        if stored.dtype() == dtype {
            return Ok(stored);
        }
        if stored.dtype() != DType::F8E4M3 {
            // A number that is none in an integer dtype would come back as another number.
            if is_float(stored.dtype()) && !is_float(dtype) {
                return Err(Error::TensorDType {
                    tensor: name.to_string(),
                    got: stored.dtype().as_str().into(),
                    expected: format!("{}, which was asked for", dtype.as_str()),
                });
            }
            return Ok(stored.to_dtype(dtype)?);
        }
        if !is_float(dtype) {
            return Err(Error::BuilderDType { got: dtype });
        }
        let scale_name = self.scale_of(&stored_name)?;
        let told = match split(&stored_name) {
            (path, "weight") => self.layer(path)?.and_then(|scheme| scheme.weight),
            _ => None,
        };
        let granularity = self.granularity(&stored_name, &scale_name, told)?;
        let scale = self.scale_values(&scale_name, device)?;
        Ok(
            Fp8Tensor::from_f8e4m3(&stored, granularity, Contraction::Cols, scale)?
                .dequantize(dtype)?,
        )
    }

    /// Scales as checked f32 numbers: bytes mean powers of two.
    fn scale_values(&self, name: &str, device: &Device) -> Result<Tensor> {
        let stored = self.tensor(name, &Device::Cpu)?;
        let bytes = match stored.dtype() {
            DType::U8 => stored.flatten_all()?.to_vec1::<u8>()?,
            DType::F8E8M0 => raw_bytes(&stored)?,
            _ => {
                let scales = stored.to_dtype(DType::F32)?;
                check_scale_values(name, &scales)?;
                return Ok(scales.to_device(device)?);
            }
        };
        let scales = Tensor::from_vec(powers_of_two(&bytes), stored.dims(), &Device::Cpu)?;
        check_mx_scale_values(name, &scales)?;
        Ok(scales.to_device(device)?)
    }
}

fn powers_of_two(bytes: &[u8]) -> Vec<f32> {
    bytes
        .iter()
        .map(|byte| E8M0::from_bits(*byte).to_f32())
        .collect()
}

fn raw_bytes(tensor: &Tensor) -> Result<Vec<u8>> {
    let (storage, layout) = tensor.storage_and_layout();
    match (&*storage, layout.contiguous_offsets()) {
        (candle_core::Storage::Cpu(candle_core::CpuStorage::F8E8M0(bytes)), Some((start, end))) => {
            Ok(bytes[start..end].to_vec())
        }
        _ => Err(candle_core::Error::msg("scales are not in contiguous host memory").into()),
    }
}

fn mismatch(path: &str, family: &dyn Family, says: &str, found: String) -> Error {
    Error::SchemeMismatch {
        layer: path.to_string(),
        path: family.source().map_or_else(PathBuf::new, Path::to_path_buf),
        says: says.to_string(),
        found,
    }
}

fn wrong_dtype(name: &str, got: Option<Dtype>, expected: &str) -> Error {
    Error::TensorDType {
        tensor: name.to_string(),
        got: got.map_or("missing".into(), |got| format!("{got:?}")),
        expected: expected.into(),
    }
}

/// The path of a layer and the tensor's own name.
pub(super) fn split(name: &str) -> (&str, &str) {
    name.rsplit_once('.').unwrap_or(("", name))
}

pub(super) fn join(path: &str, own: &str) -> String {
    crate::nn::join(path, own)
}

fn weight_name(path: &str) -> String {
    join(path, "weight")
}
