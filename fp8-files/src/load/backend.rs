//! A checkpoint as a candle VarBuilder: canonical names, whatever the family calls its tensors.

use super::Checkpoint;
use crate::check::is_float;
use crate::error::Error;
use crate::names::split;
use crate::scheme::LayerScheme;
use candle_core::{DType, Device, Result, Shape, Tensor};
use candle_nn::VarBuilder;
use candle_nn::var_builder::SimpleBackend;
use std::path::Path;

/// A name that only [`Backend`] contains.
const CHECKED: &str = "__fp8_checked__";
/// The name of a layer's scheme, beside its weight; see [`LayerScheme::to_tensor`].
const SCHEME: &str = "__fp8_scheme__";

/// Whether `vb` reads from a [`Checkpoint`], which has checked dtypes and scales.
pub(super) fn is_checked(vb: &VarBuilder<'_>) -> bool {
    vb.contains_tensor(CHECKED) && !vb.contains_tensor("__no_such_tensor__")
}

/// Whether `vb` really has a tensor of this name. `VarBuilder::zeros` claims to have every name.
pub(super) fn holds(vb: &VarBuilder<'_>, name: &str) -> bool {
    vb.contains_tensor(name) && !vb.contains_tensor("__no_such_tensor__")
}

/// How the layer at `vb` is stored; None where `vb` is not the VarBuilder of a [`Checkpoint`].
pub(super) fn scheme(vb: &VarBuilder<'_>) -> Result<Option<LayerScheme>> {
    if !is_checked(vb) {
        return Ok(None);
    }
    let scheme = vb.get_unchecked_dtype(SCHEME, DType::U8)?;
    LayerScheme::from_tensor(&scheme).map(Some)
}

impl Checkpoint {
    /// A VarBuilder over this checkpoint. All tensors but FP8 weights are cast to `dtype`.
    ///
    /// # Errors
    /// If `dtype` is not f32, bf16, f16 or f64.
    pub fn var_builder(self, dtype: DType, device: &Device) -> crate::Result<VarBuilder<'static>> {
        if !is_float(dtype) {
            return Err(Error::BuilderDType { got: dtype });
        }
        let backend = Box::new(Backend(self));
        Ok(VarBuilder::from_backend(backend, dtype, device.clone()))
    }
}

/// The backend of a [`Checkpoint`]'s VarBuilder.
struct Backend(Checkpoint);

impl Backend {
    fn layer_scheme(&self, name: &str) -> Option<Result<Tensor>> {
        let path = name.strip_suffix(SCHEME)?;
        let scheme = self.0.scheme(path.strip_suffix('.').unwrap_or(path));
        Some(match scheme {
            Err(error) => Err(error.into()),
            Ok(Some(scheme)) => scheme.to_tensor(),
            Ok(None) => Err(Error::MissingTensor {
                tensor: name.to_string(),
                place: "the configuration".into(),
            }
            .into()),
        })
    }
}

impl SimpleBackend for Backend {
    fn get(
        &self,
        shape: Shape,
        name: &str,
        _: candle_nn::Init,
        dtype: DType,
        device: &Device,
    ) -> Result<Tensor> {
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

    fn get_unchecked(&self, name: &str, dtype: DType, device: &Device) -> Result<Tensor> {
        if let Some(scheme) = self.layer_scheme(name) {
            return scheme;
        }
        let value = self.0.value(name, dtype, device)?;
        self.0.loaded.note(name);
        Ok(value)
    }

    fn contains_tensor(&self, name: &str) -> bool {
        // Without a scale a layer takes its weight for one in high precision.
        let shown = |name: &str| {
            let (path, own) = split(name);
            !own.ends_with("_scale") || !self.0.is_decoded(path)
        };
        name.ends_with(CHECKED) || self.0.resolve(name).is_some_and(|name| shown(&name))
    }
}

/// Opens safetensors files as a VarBuilder: see [`Checkpoint`].
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// # let dir = tempfile::tempdir()?;
/// # let path = fp8_test_support::files::fp8_model(dir.path());
/// use fp8::load;
/// let vb = load::var_builder(&[path], DType::F32, &Device::Cpu)?;
/// // A stock layer gets the dequantized weight.
/// let layer = candle_nn::linear(64, 32, vb.pp("fc"))?;
/// assert_eq!(layer.weight().dtype(), DType::F32);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`Checkpoint::open`] and [`Checkpoint::var_builder`].
pub fn var_builder<P: AsRef<Path>>(
    paths: &[P],
    dtype: DType,
    device: &Device,
) -> crate::Result<VarBuilder<'static>> {
    Checkpoint::open(paths)?.var_builder(dtype, device)
}

/// Opens the model in a directory as a VarBuilder: see [`Checkpoint::open_dir`].
///
/// ```no_run
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device};
/// use fp8::{load, nn};
/// let vb = load::open_dir("Qwen3-8B-FP8", DType::F32, &Device::Cpu)?;
/// let layer = nn::linear_no_bias(4096, 4096, vb.pp("model.layers.0.self_attn.q_proj"))?;
/// assert!(layer.static_weight().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`Checkpoint::open_dir`] and [`Checkpoint::var_builder`].
pub fn open_dir(
    dir: impl AsRef<Path>,
    dtype: DType,
    device: &Device,
) -> crate::Result<VarBuilder<'static>> {
    Checkpoint::open_dir(dir)?.var_builder(dtype, device)
}
