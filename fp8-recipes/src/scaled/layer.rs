//! The layers of [`nn`](crate::nn) on scaled tensors.

use super::array::Array;
use crate::error::{Error, Result};
use crate::nn;
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Tensor};
use fp8_scaled::{Scaled, ScaledVar};

/// A layer that computes on plain tensors and on scaled ones.
///
/// On a [`Tensor`] that is the layer's forward pass, in FP8 under a guard. On a [`Scaled`] the layer multiplies its scaled
/// parameters, which it has if it was built on a [`ScaledVarMap`](super::ScaledVarMap), under the
/// [settings](fp8_scaled::ScaledOptions) of the scope.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::as_scaled;
/// use fp8::nn;
/// use fp8::scaled::{Array, Layer, ScaledVarMap};
///
/// fn mlp<A: Array>(layers: &[nn::Linear], x: &A) -> fp8::Result<A> {
///     let [up, down] = layers else { panic!("two layers") };
///     down.apply(&up.apply(x)?.relu()?)
/// }
///
/// let vars = ScaledVarMap::new(DType::F16, &Device::Cpu)?;
/// let vb = vars.var_builder();
/// let layers = [nn::linear(8, 16, vb.pp("up"))?, nn::linear(16, 4, vb.pp("down"))?];
/// let x = Tensor::ones((2, 8), DType::F16, &Device::Cpu)?;
/// let y = mlp(&layers, &as_scaled(&x, None)?)?;
/// let grads = y.sum_all()?.backward()?;
/// assert_eq!(grads.len(), 4);
/// // The same model on plain tensors, with the values of the same parameters.
/// let plain = mlp(&layers, &x)?;
/// # let error = (plain.to_dtype(DType::F32)? - y.value()?)?.abs()?.max_all()?.to_scalar::<f32>()?;
/// # assert!(error < 0.02, "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub trait Layer<A: Array> {
    /// What the layer makes of `x`.
    ///
    /// # Errors
    /// Those of the layer's forward pass; [`Error::NotScaled`] for a scaled `x` where a parameter is a plain tensor.
    fn apply(&self, x: &A) -> Result<A>;
}

impl<A: Array> Layer<A> for nn::Linear {
    fn apply(&self, x: &A) -> Result<A> {
        A::linear(self, x)
    }
}

impl<A: Array> Layer<A> for nn::Conv2d {
    fn apply(&self, x: &A) -> Result<A> {
        A::conv2d(self, x)
    }
}

impl<A: Array> Layer<A> for nn::LayerNorm {
    fn apply(&self, x: &A) -> Result<A> {
        A::layer_norm(self, x)
    }
}

impl<A: Array> Layer<A> for nn::RmsNorm {
    fn apply(&self, x: &A) -> Result<A> {
        A::layer_norm(self.as_layer_norm(), x)
    }
}

impl<A: Array> Layer<A> for nn::Activation {
    /// On scaled tensors [`fp8_scaled::Error::NoScaleRule`] for activations without a rule.
    fn apply(&self, x: &A) -> Result<A> {
        A::activation(self, x)
    }
}

impl<A: Array, L: Layer<A>> Layer<A> for [L] {
    /// One layer after the other.
    fn apply(&self, x: &A) -> Result<A> {
        self.iter().try_fold(x.clone(), |x, layer| layer.apply(&x))
    }
}

impl<A: Array, L: Layer<A>> Layer<A> for Vec<L> {
    /// One layer after the other.
    fn apply(&self, x: &A) -> Result<A> {
        self.as_slice().apply(x)
    }
}

impl<A: Array, L: Layer<A>> Layer<A> for Option<L> {
    /// The input where there is no layer.
    fn apply(&self, x: &A) -> Result<A> {
        match self {
            Some(layer) => layer.apply(x),
            None => Ok(x.clone()),
        }
    }
}

impl<A: Array, L: Layer<A> + ?Sized> Layer<A> for Box<L> {
    fn apply(&self, x: &A) -> Result<A> {
        (**self).apply(x)
    }
}

impl nn::Embedding {
    /// The rows `indexes` of the table, plain or scaled.
    ///
    /// # Errors
    /// If an index is not in the table; [`Error::NotScaled`] for scaled rows of a plain table.
    pub fn lookup<A: Array>(&self, indexes: &Tensor) -> Result<A> {
        A::embedding(self, indexes)
    }
}

/// The scaled parameter that holds `tensor`.
pub(super) fn parameter(tensor: &Tensor, path: Option<&str>, own: &str) -> Result<Scaled> {
    match ScaledVar::of(tensor) {
        Some(var) => Ok(var.value()),
        None => Err(Error::NotScaled {
            tensor: nn::join(path.unwrap_or("without a path"), own),
        }),
    }
}

pub(super) fn optional(
    tensor: Option<&Tensor>,
    path: Option<&str>,
    own: &str,
) -> Result<Option<Scaled>> {
    tensor.map(|t| parameter(t, path, own)).transpose()
}

/// `tensor`, or the value in `dtype` of the scaled parameter whose data it is: what a layer multiplies a plain tensor by. No gradient
/// reaches the parameter from there.
pub(crate) fn plain_value(tensor: &Tensor, dtype: DType) -> Result<Tensor> {
    match ScaledVar::of(tensor) {
        Some(var) => Ok(var.value().to_tensor(dtype)?),
        None => Ok(tensor.clone()),
    }
}

/// Fails if `model` shows a scaled parameter: for functions that save or load variables, which it is none of.
pub(crate) fn refuse_scaled_model<M: Fp8Module + ?Sized>(
    model: &M,
    function: &'static str,
    instead: &'static str,
) -> Result<()> {
    struct First(Option<ScaledVar>);
    impl Visitor for First {
        fn tensor(&mut self, _: Option<&str>, tensor: &Tensor) {
            if self.0.is_none() {
                self.0 = ScaledVar::of(tensor);
            }
        }
    }
    let mut first = First(None);
    model.visit(&mut first);
    match first.0 {
        None => Ok(()),
        Some(var) => Err(Error::ScaledParameter {
            tensor: var.name().to_string(),
            function,
            instead,
        }),
    }
}

/// For layers that know nothing of scales: an error where a parameter is scaled, since they would compute with its data.
pub(crate) fn refuse_scaled(layer: &'static str, path: &str, tensors: &[&Tensor]) -> Result<()> {
    match tensors.iter().any(|tensor| ScaledVar::of(tensor).is_some()) {
        true => Err(Error::NoScaledForm {
            layer,
            path: path.to_string(),
        }),
        false => Ok(()),
    }
}

pub(super) fn linear(layer: &nn::Linear, x: &Scaled) -> Result<Scaled> {
    let _span = tracing::trace_span!("linear", path = layer.path()).entered();
    let path = layer.path();
    let weight = parameter(crate::module::Fp8Layer::held_weight(layer), path, "weight")?;
    let bias = optional(layer.bias(), path, "bias")?;
    let in_features = weight.dims()[1];
    let got = x.dims().last().copied().unwrap_or(0);
    if got != in_features {
        return Err(fp8_candle::Error::InFeatures {
            path: path.unwrap_or("without a path").to_string(),
            expected: in_features,
            got,
            shape: x.dims().to_vec(),
        }
        .into());
    }
    Ok(x.linear(&weight, bias.as_ref())?)
}

pub(super) fn conv2d(layer: &nn::Conv2d, x: &Scaled) -> Result<Scaled> {
    let path = layer.path();
    let kernel = parameter(layer.weight(), path, "weight")?;
    let config = layer.config();
    let y = x.conv2d(
        &kernel,
        config.padding,
        config.stride,
        config.dilation,
        config.groups,
    )?;
    match optional(layer.bias(), path, "bias")? {
        None => Ok(y),
        Some(bias) => {
            let channels = bias.dims()[0];
            Ok(y.add(&bias.reshape(&[1, channels, 1, 1])?)?)
        }
    }
}

pub(super) fn layer_norm(layer: &nn::LayerNorm, x: &Scaled) -> Result<Scaled> {
    let _span = tracing::trace_span!("norm", path = layer.path()).entered();
    let path = layer.path();
    let gain = parameter(layer.weight(), path, "weight")?;
    if layer.remove_mean() {
        let bias = optional(layer.bias(), path, "bias")?;
        return Ok(x.layer_norm(&gain, bias.as_ref(), layer.eps())?);
    }
    Ok(x.rms_norm(&gain, layer.eps())?)
}

pub(super) fn embedding(layer: &nn::Embedding, indexes: &Tensor) -> Result<Scaled> {
    let table = parameter(layer.embeddings(), layer.path(), "weight")?;
    Ok(table.embedding(indexes)?)
}

/// GELU by the error function: `x (1 + erf(x / sqrt 2)) / 2`.
pub(crate) fn gelu_erf<A: Array>(x: &A) -> Result<A> {
    let erf = x.mul_constant(std::f64::consts::FRAC_1_SQRT_2)?.erf()?;
    x.mul(&erf.add_constant(1.0)?.mul_constant(0.5)?)
}

pub(super) fn activation(layer: &nn::Activation, x: &Scaled) -> Result<Scaled> {
    use nn::Activation;
    Ok(match layer {
        Activation::Relu => x.relu()?,
        Activation::Relu2 => x.relu()?.square()?,
        Activation::NewGelu | Activation::GeluPytorchTanh => x.gelu()?,
        Activation::Silu | Activation::Swish => x.silu()?,
        Activation::Sigmoid => x.sigmoid()?,
        Activation::Gelu => gelu_erf(x)?,
        _ => return Err(fp8_scaled::Error::NoScaleRule { op: "activation" }.into()),
    })
}
