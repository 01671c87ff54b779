//! Layers that compute on arrays of every kind.

use super::operations::Array;
use crate::error::Result;

/// A layer that computes on plain tensors and on scaled ones.
///
/// On a [`Tensor`](candle_core::Tensor) that is the layer's forward pass, in FP8 under a guard. On a
/// [`Scaled`](fp8_scaled::Scaled) the layer multiplies its scaled parameters, which it has if it was built on a
/// [`ScaledVarMap`](crate::scaled::ScaledVarMap), under the [settings](fp8_scaled::ScaledOptions) of the scope.
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
    /// Computes the layer's result for `x`.
    ///
    /// # Errors
    /// Those of the layer's forward pass; [`Error::NotScaled`](crate::Error::NotScaled) for a scaled `x` where a parameter is a
    /// plain tensor.
    fn apply(&self, x: &A) -> Result<A>;
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
