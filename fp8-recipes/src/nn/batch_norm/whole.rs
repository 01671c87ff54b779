//! The batch norms of a whole model folded into the layers before them.

use super::fuse::folded;
use crate::config::ConfigError;
use crate::error::{Error, LayerError, Result};
use crate::module::{Fp8Layer, Fp8Module, Fp8Operator, Visitor, show_batch_norm, show_layer};
use crate::nn::scaled_parameter::refuse_scaled_model;
use candle_core::{Tensor, TensorId};
use candle_nn::BatchNorm;
use fp8_files::names::{join, near};
use std::collections::{HashMap, HashSet};

/// The parameters of `model` with each batch norm of `pairs` folded into the layer before it, for evaluation. A pair is the path
/// of a linear layer or convolution and that of the batch norm that is the only reader of its output.
///
/// The same model made of them ([`VarBuilder::from_tensors`](candle_nn::VarBuilder::from_tensors)) computes the same up to the
/// rounding of the products, and FP8 casts the folded weights: quantize or calibrate it afterwards. Saved with
/// `candle_core::safetensors::save`, they are a checkpoint of the model. Names, shapes and dtypes do not change: the batch norm
/// becomes the identity, or after a layer without a bias adds the folded bias. [`fuse_batch_norm`](super::fuse_batch_norm) makes
/// one layer of a pair.
///
/// The fields of a model do not show in which order it computes, so the caller names the pairs; [`adjacent_batch_norms`] suggests
/// them.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// use fp8_recipes::{Fp8Module, nn, nn::ModuleT};
/// #[derive(Fp8Module)]
/// struct Stem {
///     conv: nn::Conv2d,
///     bn: nn::BatchNorm,
/// }
/// # impl Stem {
/// #     fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
/// #         let conv = nn::conv2d_no_bias(2, 4, 3, Default::default(), vb.pp("conv"))?;
/// #         Ok(Self { conv, bn: nn::batch_norm(4, 1e-5, vb.pp("bn"))? })
/// #     }
/// #     fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
/// #         self.bn.forward_t(&self.conv.forward(x)?, false)
/// #     }
/// # }
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vars = VarMap::new();
/// let model = Stem::new(VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu))?;
/// let pairs = nn::adjacent_batch_norms(&model);
/// assert_eq!(pairs, [("conv".to_string(), "bn".to_string())]);
/// let tensors = nn::fold_batch_norms(&model, &pairs)?;
/// let folded = Stem::new(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))?;
/// let x = Tensor::randn(0f32, 1., (1, 2, 8, 8), &Device::Cpu)?;
/// let apart = (folded.forward(&x)? - model.forward(&x)?)?.abs()?.flatten_all()?.max(0)?;
/// assert!(apart.to_scalar::<f32>()? < 1e-5);
/// # Ok(()) }
/// ```
///
/// # Errors
/// [`ConfigError::UnmatchedPattern`] for a path without such a layer or batch norm. [`LayerError::CannotFold`] if the numbers of
/// channels differ, a path is in two pairs or occurs twice in the model, the weight is used elsewhere, holds FP8 codes, or
/// belongs to a transposed convolution with groups. [`LayerError::Unnamed`] for a parameter without a path,
/// [`Error::ScaledParameter`] for a model with scaled ones.
pub fn fold_batch_norms<M: Fp8Module + ?Sized, L: AsRef<str>, B: AsRef<str>>(
    model: &M,
    pairs: &[(L, B)],
) -> Result<HashMap<String, Tensor>> {
    refuse_scaled_model(model, "nn::fold_batch_norms", "fold plain parameters")?;
    let parts = ModelParts::of(model)?;
    let mut tensors = parts.tensors.clone();
    let mut taken = HashSet::new();
    for (layer, norm) in pairs {
        let (layer, norm) = (layer.as_ref(), norm.as_ref());
        let refused = |reason: String| -> Error {
            LayerError::CannotFold {
                layer: layer.to_string(),
                batch_norm: norm.to_string(),
                reason,
            }
            .into()
        };
        let found = parts.layer(layer)?;
        let bn = parts.norm(norm)?;
        for path in [layer, norm] {
            if !taken.insert(path) {
                return Err(refused(format!("`{path}` is in another pair too")));
            }
            if parts.paths.iter().filter(|other| *other == path).count() > 1 {
                return Err(refused(format!("`{path}` occurs twice in the model")));
            }
        }
        let channels = found.channels.ok_or_else(|| {
            refused("its weight has no dimension of output channels alone".into())
        })?;
        let uses = parts.uses.get(&found.weight.id()).copied();
        if uses != Some(1) {
            return Err(refused("its weight is used elsewhere too".into()));
        }
        let (weight, bias) = folded(&found.weight, found.bias.as_ref(), bn, channels)
            .map_err(|error| refused(error.to_string()))?;
        tensors.insert(join(layer, "weight"), weight);
        let mean = bn.running_mean();
        let stays = match found.bias {
            Some(_) => mean.zeros_like()?,
            None => bias.to_dtype(mean.dtype())?.neg()?,
        };
        if found.bias.is_some() {
            tensors.insert(join(layer, "bias"), bias);
        }
        let variance = (mean.ones_like()? - bn.eps())?;
        let mut set = |name, value: Tensor| tensors.insert(join(norm, name), value.detach());
        set("running_mean", stays);
        set("running_var", variance);
        if let Some((weight, bias)) = bn.weight_and_bias() {
            set("weight", weight.ones_like()?);
            set("bias", bias.zeros_like()?);
        }
    }
    Ok(tensors)
}

/// Pairs for [`fold_batch_norms`]: each linear layer or convolution that a batch norm of as many features follows directly in the order of
/// the fields, both in the same part of the model (`block.conv`, `block.bn`).
///
/// Check them before use: only `forward` knows whether the layer's output goes into the batch norm and nowhere else.
pub fn adjacent_batch_norms<M: Fp8Module + ?Sized>(model: &M) -> Vec<(String, String)> {
    let mut parts = ModelParts::default();
    model.visit(&mut parts);
    let parent = |path: &str| path.rsplit_once('.').map(|(parent, _)| parent.to_string());
    let pairs = parts.order.windows(2).filter_map(|two| match two {
        [Part::Layer(layer), Part::Norm(path, norm)] => {
            let of_layer = layer.weight.dims().get(layer.channels?).copied();
            let fits = of_layer == norm.running_mean().dims().first().copied();
            (fits && parent(&layer.path) == parent(path))
                .then(|| (layer.path.clone(), path.clone()))
        }
        _ => None,
    });
    pairs.collect()
}

struct FoldableLayer {
    path: String,
    weight: Tensor,
    bias: Option<Tensor>,
    /// The dimension of the weight that has the output channels.
    channels: Option<usize>,
}

enum Part {
    Layer(FoldableLayer),
    Norm(String, BatchNorm),
    Other,
}

/// What a visit has shown.
#[derive(Default)]
struct ModelParts {
    order: Vec<Part>,
    /// Of layers and batch norms.
    paths: Vec<String>,
    tensors: HashMap<String, Tensor>,
    uses: HashMap<TensorId, usize>,
    error: Option<Error>,
}

impl ModelParts {
    fn of<M: Fp8Module + ?Sized>(model: &M) -> Result<Self> {
        let mut parts = Self::default();
        model.visit(&mut parts);
        match parts.error.take() {
            Some(error) => Err(error),
            None => Ok(parts),
        }
    }

    fn layer(&self, path: &str) -> Result<&FoldableLayer> {
        let layers = || {
            self.order.iter().filter_map(|part| match part {
                Part::Layer(layer) => Some(layer),
                _ => None,
            })
        };
        let found = layers().find(|layer| layer.path == path);
        found.ok_or_else(|| unknown(path, layers().map(|layer| layer.path.as_str())))
    }

    fn norm(&self, path: &str) -> Result<&BatchNorm> {
        let norms = || {
            self.order.iter().filter_map(|part| match part {
                Part::Norm(path, norm) => Some((path, norm)),
                _ => None,
            })
        };
        let found = norms().find(|(own, _)| *own == path).map(|(_, norm)| norm);
        found.ok_or_else(|| unknown(path, norms().map(|(path, _)| path.as_str())))
    }
}

fn unknown<'a>(path: &str, paths: impl Iterator<Item = &'a str>) -> Error {
    ConfigError::UnmatchedPattern {
        pattern: path.to_string(),
        near: near(path, paths),
    }
    .into()
}

impl Visitor for ModelParts {
    fn layer(&mut self, layer: &dyn Fp8Layer) {
        show_layer(self, layer);
        let part = layer.path().map(|path| {
            self.paths.push(path.to_string());
            let holds_codes = layer.static_weight().is_some();
            Part::Layer(FoldableLayer {
                path: path.to_string(),
                weight: layer.held_weight().clone(),
                bias: layer.bias().cloned(),
                channels: layer.output_dim().filter(|_| !holds_codes),
            })
        });
        self.order.push(part.unwrap_or(Part::Other));
    }

    fn operator(&mut self, _: &dyn Fp8Operator) {
        self.order.push(Part::Other);
    }

    fn batch_norm(&mut self, path: Option<&str>, norm: &BatchNorm) {
        show_batch_norm(self, path, norm);
        self.order.push(match path {
            Some(path) => {
                self.paths.push(path.to_string());
                Part::Norm(path.to_string(), norm.clone())
            }
            None => Part::Other,
        });
    }

    fn tensor(&mut self, path: Option<&str>, tensor: &Tensor) {
        *self.uses.entry(tensor.id()).or_default() += 1;
        match path {
            Some(path) => {
                self.tensors.insert(path.to_string(), tensor.detach());
            }
            // A mask or a table of sines is not a parameter.
            None if tensor.is_variable() => {
                let shape = tensor.dims().to_vec();
                self.error
                    .get_or_insert(LayerError::Unnamed { shape }.into());
            }
            None => {}
        }
    }
}
