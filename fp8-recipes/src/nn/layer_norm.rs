//! `candle_nn::layer_norm`: norms whose gradients reach everything before them.

pub use candle_nn::layer_norm::LayerNormConfig;

use super::identity::{SharedState, path_and_state, path_methods};
use super::scaled_parameter::{freeze, optional, scaled, value_of};
use crate::array::{Array, InNode, Layer};
use crate::autocast::{Fp8State, OperatorCasts, Prepared, current};
use crate::module::{Fp8Operator, LayerKind, show};
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Device, Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fp8_candle::{Wide, ops};
use fp8_scaled::{Parameter, Scaled};
use std::sync::Arc;
use tracing::span::EnteredSpan;

/// `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension.
///
/// Same constructors as `candle_nn::LayerNorm`, which cuts the gradient when it has a bias.
///
/// ```
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use fp8_recipes::nn;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let ones = Tensor::ones(2, DType::F32, &Device::Cpu)?;
/// let norm = nn::LayerNorm::new(ones.clone(), ones, 0.);
/// let y = norm.forward(&Tensor::new(&[[3f32, 5.]], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[0., 2.]]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Parameter,
    bias: Option<Parameter>,
    remove_mean: bool,
    eps: f64,
    path: Option<Arc<str>>,
    /// Names of weight and bias; `gamma` and `beta` in old checkpoints of transformers.
    names: [&'static str; 2],
    state: SharedState,
}

const NAMES: [&str; 2] = ["weight", "bias"];

impl LayerNorm {
    /// `weight`, `bias`: `[size]`.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self::of(weight, Some(bias), true, eps)
    }

    /// Without a bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self::of(weight, None, true, eps)
    }

    /// Root-mean-square norm: does not subtract the mean.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self::of(weight, None, false, eps)
    }

    fn of(weight: Tensor, bias: Option<Tensor>, remove_mean: bool, eps: f64) -> Self {
        Self {
            weight: Parameter::gathered(&weight),
            bias: bias.as_ref().map(Parameter::gathered),
            remove_mean,
            eps,
            path: None,
            names: NAMES,
            state: SharedState::default(),
        }
    }

    /// `[size]`.
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }

    /// `[size]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(Parameter::tensor)
    }

    /// The same norm without gradients for its parameters, as [`Linear::frozen`](super::Linear::frozen).
    #[must_use]
    pub fn frozen(mut self) -> Self {
        freeze(&mut self.weight);
        self.bias.as_mut().map(freeze);
        self
    }

    /// The number added to the variance.
    pub fn eps(&self) -> f64 {
        self.eps
    }

    /// Whether the mean is subtracted.
    pub fn remove_mean(&self) -> bool {
        self.remove_mean
    }
}

impl Module for LayerNorm {
    /// `[.., size]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _span = self.entered();
        OperatorCasts::around(self.state.prepared(), self.path(), |casts| match casts {
            None => self.plain(x),
            // The FP8 Emulation Toolkit does not cast the weight either.
            Some(casts) => Ok(casts.output(&self.plain(&casts.input(x)?)?)?),
        })
    }
}

impl LayerNorm {
    /// Enters the span of a forward pass.
    fn entered(&self) -> EnteredSpan {
        let kind = if self.remove_mean {
            "layer-norm"
        } else {
            "rms-norm"
        };
        tracing::trace_span!("norm", kind, path = self.path()).entered()
    }

    /// Whether a recipe may cast the tensors around it.
    pub(super) fn is_prepared(&self) -> bool {
        self.state.get().is_some()
    }

    /// Whether its parameters are plain tensors.
    pub(super) fn is_plain(&self) -> bool {
        let parameters = [Some(&self.weight), self.bias.as_ref()];
        let mut parameters = parameters.into_iter().flatten();
        parameters.all(|parameter| parameter.scaled().is_none())
    }

    fn plain(&self, x: &Tensor) -> Result<Tensor> {
        let weight = self.weight.value(x.dtype())?;
        let bias = value_of(self.bias.as_ref(), x.dtype())?;
        self.normalize(x, &weight, bias.as_ref())
    }

    /// The norm of `x` with these parameters, cast to the dtype of `x` where a norm does not take them as they are.
    fn normalize(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let cast = |parameter: &Tensor| match fits(x.dtype(), weight, bias) {
            true => Ok(parameter.clone()),
            false => parameter.to_dtype(x.dtype()),
        };
        let bias = bias.map(cast).transpose()?;
        let weight = cast(weight)?;
        if self.remove_mean {
            return Ok(ops::layer_norm(x, &weight, bias.as_ref(), self.eps)?);
        }
        let y = ops::rms_norm(x, &weight, self.eps)?;
        match &bias {
            None => Ok(y),
            Some(bias) => y.broadcast_add(&bias.to_dtype(x.dtype())?),
        }
    }

    fn on_scaled(&self, x: &Scaled) -> crate::Result<Scaled> {
        let _span = self.entered();
        let gain = scaled(&self.weight, self.path(), "weight")?;
        let bias = optional(self.bias.as_ref(), self.path(), "bias")?;
        if self.remove_mean {
            return Ok(x.layer_norm(&gain, bias.as_ref(), self.eps)?);
        }
        let y = x.rms_norm(&gain, self.eps)?;
        match &bias {
            None => Ok(y),
            Some(bias) => Ok(y.add(bias)?),
        }
    }

    fn in_node(&self, x: &InNode) -> crate::Result<InNode> {
        let _span = self.entered();
        // Nothing is cast around norms in a node, so inside a guard that casts, a module with prepared norms does not become a node.
        if let (Prepared::Never, Some(context)) = (self.state.prepared(), current()) {
            context.note_operator(self.path());
        }
        // Plain, or in parts, which are f32: a node takes no scaled parameters.
        let weight = &self.weight.value(DType::F32)?;
        let bias = value_of(self.bias.as_ref(), DType::F32)?;
        let bias = bias.as_ref();
        x.operation(|node, x| {
            let plain = fits(x.dtype(), weight, bias);
            match (self.remove_mean, bias) {
                (true, _) if plain => node.layer_norm(x, weight, bias, self.eps),
                (false, None) if plain => node.rms_norm(x, weight, self.eps),
                // The node's RMS norm adds no bias.
                _ => {
                    let mut values = vec![x.clone(), node.argument(weight)];
                    values.extend(bias.map(|bias| node.argument(bias)));
                    let values: Vec<&Wide> = values.iter().collect();
                    let own = self.clone();
                    node.apply(&values, move |args| {
                        Ok(own.normalize(&args[0], &args[1], args.get(2))?)
                    })
                }
            }
        })
    }
}

/// Whether a norm of values in `dtype` takes these parameters as they are: in that dtype, or both in f32.
fn fits(dtype: DType, weight: &Tensor, bias: Option<&Tensor>) -> bool {
    let own = weight.dtype();
    let known = own == dtype || own == DType::F32 && dtype != DType::F64;
    known && bias.is_none_or(|bias| bias.dtype() == own)
}

impl<A: Array> Layer<A> for LayerNorm {
    fn apply(&self, x: &A) -> crate::Result<A> {
        x.by_kind(
            |x| Ok(self.forward(x)?),
            |x| self.on_scaled(x),
            |x| self.in_node(x),
        )
    }
}

path_methods!(LayerNorm, state);

impl Fp8Operator for LayerNorm {
    path_and_state!();

    fn kind(&self) -> LayerKind {
        match self.remove_mean {
            true => LayerKind::LayerNorm,
            false => LayerKind::RmsNorm,
        }
    }

    fn device(&self) -> Option<&Device> {
        Some(self.weight().device())
    }
}

impl Fp8Module for LayerNorm {
    fn visit(&self, visitor: &mut dyn Visitor) {
        show(visitor, self.path(), self.names[0], self.weight());
        if let Some(bias) = self.bias() {
            show(visitor, self.path(), self.names[1], bias);
        }
        visitor.operator(self);
    }
}

/// Creates or loads a layer norm, with candle-nn's initialization and configuration.
pub fn layer_norm<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder<'_>,
) -> Result<LayerNorm> {
    let config = config.into();
    let name = |own: &'static str, old: &'static str| {
        let only_old = !vb.contains_tensor(own) && vb.contains_tensor(old);
        if only_old { old } else { own }
    };
    let mut names = NAMES;
    names[0] = name("weight", "gamma");
    let weight = vb.get_with_hints(size, names[0], Init::Const(1.))?;
    let bias = if config.affine {
        names[1] = name("bias", "beta");
        Some(vb.get_with_hints(size, names[1], Init::Const(0.))?)
    } else {
        None
    };
    Ok(LayerNorm {
        names,
        ..LayerNorm::of(weight, bias, config.remove_mean, config.eps).with_path(vb.prefix())
    })
}

/// Creates or loads a layer norm without bias.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<LayerNorm> {
    let config = LayerNormConfig {
        eps,
        remove_mean: true,
        affine: false,
    };
    layer_norm(size, config, vb)
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
///
/// Same constructors as `candle_nn::RmsNorm`, which cuts the gradient.
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// `weight`: `[size]`.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    /// Sets the checkpoint path.
    #[must_use]
    pub fn with_path(self, path: impl Into<Arc<str>>) -> Self {
        Self(self.0.with_path(path))
    }

    /// As [`LayerNorm::frozen`].
    #[must_use]
    pub fn frozen(self) -> Self {
        Self(self.0.frozen())
    }

    /// The same as a [`LayerNorm`] that keeps the mean.
    pub fn into_inner(self) -> LayerNorm {
        self.0
    }

    /// `[size]`.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }

    /// The number added to the mean square.
    pub fn eps(&self) -> f64 {
        self.0.eps()
    }

    /// Path in the checkpoint: empty at its root, None if unknown.
    pub fn path(&self) -> Option<&str> {
        self.0.path()
    }

    /// The forward pass, as [`Module::forward`]; of candle-nn's two only this one is differentiable.
    ///
    /// # Errors
    /// If `xs` does not fit the weight.
    pub fn forward_diff(&self, xs: &Tensor) -> Result<Tensor> {
        self.0.forward(xs)
    }
}

impl Module for RmsNorm {
    /// `[.., size]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl<A: Array> Layer<A> for RmsNorm {
    fn apply(&self, x: &A) -> crate::Result<A> {
        self.0.apply(x)
    }
}

/// Creates or loads an RMS norm, with candle-nn's initialization.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    let config = LayerNormConfig {
        eps,
        remove_mean: false,
        affine: false,
    };
    Ok(RmsNorm(layer_norm(size, config, vb)?))
}
