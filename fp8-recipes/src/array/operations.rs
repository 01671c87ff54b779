//! The operations that all kinds of arrays have.

use super::forms::{built_in, composed, of_two};
use super::in_node::InNode;
use crate::error::Result;
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::{self, Activation, AttentionOptions};
use fp8_scaled::{Direction, Norm, Scaled, ScaledDType};

/// Only this crate implements [`Array`].
pub(super) mod sealed {
    pub trait Sealed {}
}

/// A tensor that a model computes on: [`Tensor`], plain or under a recipe's guard, or [`Scaled`].
///
/// A model whose forward pass is generic over `A: Array` is written once. On plain tensors every operation is the one
/// that the model would call otherwise, with the same bits; on scaled ones it is the method of [`Scaled`], which documents
/// its rule. Layers compute on arrays by [`Layer::apply`](super::Layer::apply).
pub trait Array: sealed::Sealed + Clone + std::fmt::Debug {
    /// Sizes of the dimensions.
    fn dims(&self) -> &[usize];

    /// The device that holds the data.
    fn device(&self) -> &Device;

    /// The value as a plain f32 tensor outside any graph.
    ///
    /// # Errors
    /// If a device fails.
    fn value(&self) -> Result<Tensor>;

    /// A plain tensor in `dtype`, which layers keep whatever that of their parameters: bf16 activations beside parameters in f32.
    /// Scaled data stays as it is. Errors are those of [`fp8_candle::ops::to_dtype`].
    fn to_dtype(&self, dtype: DType) -> Result<Self> {
        let plain = move |x: &[Tensor]| Ok(fp8_candle::ops::to_dtype(&x[0], dtype)?);
        Self::combine(&[self], plain, |x| Ok(x[0].clone()))
    }

    /// The tensor, if this is a plain one.
    #[doc(hidden)]
    fn plain(&self) -> Option<&Tensor> {
        None
    }

    /// The result of the function for this kind of array.
    #[doc(hidden)]
    fn by_kind(
        &self,
        plain: impl FnOnce(&Tensor) -> Result<Tensor>,
        scaled: impl FnOnce(&Scaled) -> Result<Scaled>,
        in_node: impl FnOnce(&InNode) -> Result<InNode>,
    ) -> Result<Self>;

    /// As [`Array::by_kind`] with several results.
    #[doc(hidden)]
    fn by_kind_many(
        &self,
        plain: impl FnOnce(&Tensor) -> Result<Vec<Tensor>>,
        scaled: impl FnOnce(&Scaled) -> Result<Vec<Scaled>>,
        in_node: impl FnOnce(&InNode) -> Result<Vec<InNode>>,
    ) -> Result<Vec<Self>>;

    /// An array that is not computed from others.
    #[doc(hidden)]
    fn create(
        plain: impl FnOnce() -> Result<Tensor>,
        scaled: impl FnOnce() -> Result<Scaled>,
    ) -> Result<Self>;

    /// One result of several arrays. candle must be able to differentiate `plain`, which gives the same result at every call.
    #[doc(hidden)]
    fn combine(
        parts: &[&Self],
        plain: impl Fn(&[Tensor]) -> Result<Tensor> + Send + Sync + 'static,
        scaled: impl FnOnce(&[&Scaled]) -> Result<Scaled>,
    ) -> Result<Self>;

    /// Attention of `[b, h, t, d]`: [`fp8_candle::ops::attention`].
    ///
    /// # Errors
    /// If shapes are incompatible.
    fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self> {
        let own = options.clone();
        Self::combine(
            &[q, k, v],
            move |x| Ok(ops::attention(&x[0], &x[1], &x[2], own.clone())?),
            |x| Ok(Scaled::attention(x[0], x[1], x[2], options)?),
        )
    }

    /// The arrays concatenated along `dim`.
    ///
    /// # Errors
    /// If shapes are incompatible.
    fn cat(parts: &[&Self], dim: usize) -> Result<Self> {
        let plain = move |x: &[Tensor]| Ok(Tensor::cat(x, dim)?);
        Self::combine(parts, plain, |x| Ok(Scaled::cat(x, dim)?))
    }

    /// The last dimension cut into parts of these sizes, each contiguous.
    ///
    /// # Errors
    /// If `sizes` add up to more than its size.
    fn split(&self, sizes: &[usize]) -> Result<Vec<Self>> {
        let dim = self.dims().len().saturating_sub(1);
        let ranges = sizes.iter().scan(0, |end, &size| {
            let start = *end;
            *end += size;
            Some((start, size))
        });
        self.by_kind_many(
            |x| {
                let part = |(start, size)| Ok(x.narrow(dim, start, size)?.contiguous()?);
                ranges.clone().map(part).collect()
            },
            |x| {
                let part = |(start, size)| Ok(x.narrow(dim, start, size)?.contiguous()?);
                ranges.clone().map(part).collect()
            },
            |x| x.split(sizes),
        )
    }

    /// An activation, gated or not: [`Activation::apply`]. A scaled result has the scale that [`Scaled::activation`] gives it.
    ///
    /// # Errors
    /// If the number of features is odd where the activation is gated.
    fn activation(&self, activation: Activation) -> Result<Self> {
        self.by_kind(
            |x| Ok(activation.apply(x)?),
            |x| {
                if !activation.is_gated() {
                    return Ok(x.activation(activation)?);
                }
                let n = Array::dims(x).last().copied().unwrap_or(0) / 2;
                match x.split(&[n, n])?.as_slice() {
                    [gate, value] => Ok(gate.activation(activation)?.mul(value)?),
                    _ => unreachable!("two sizes give two parts"),
                }
            },
            |x| x.activation(activation),
        )
    }

    /// A gated activation of gate and value in arrays of one shape: [`Activation::apply_pair`].
    ///
    /// # Errors
    /// If shapes differ or the activation is not gated.
    fn gated_activation(&self, value: &Self, activation: Activation) -> Result<Self> {
        Self::combine(
            &[self, value],
            move |x| Ok(activation.apply_pair(&x[0], &x[1])?),
            |x| Ok(x[0].activation(activation)?.mul(x[1])?),
        )
    }

    built_in! {
        /// The same elements in another shape.
        fn reshape(dims: &[usize]) = |x| x.reshape(dims)?;

        /// Row by row in memory.
        fn contiguous() = |x| x.contiguous()?;

        /// Two dimensions exchanged.
        fn transpose(first: usize, second: usize) = |x| x.transpose(first, second)?;





        /// Rotary position embedding, half-split, of `[b, h, t, d]`: [`fp8_candle::ops::rope`].
        fn rope(cos: &Tensor, sin: &Tensor) = |x| ops::rope(x, cos, sin)?;

        /// A share `p` of the elements becomes 0, the others are multiplied by `1 / (1 - p)`. `seed` and the position decide which.
        fn dropout(p: f64, seed: u64) = |x| ops::dropout(x, p, seed)?;

    }

    /// Rotary position embedding, interleaved, of `[b, h, t, d]`: [`fp8_candle::ops::rope_i`].
    ///
    /// # Errors
    /// If shapes or dtypes are incompatible; [`fp8_scaled::Error::NoScaleRule`] for scaled arrays.
    fn rope_i(&self, cos: &Tensor, sin: &Tensor) -> Result<Self> {
        self.by_kind(
            |x| Ok(ops::rope_i(x, cos, sin)?),
            |_| Err(fp8_scaled::Error::NoScaleRule { op: "rope_i" }.into()),
            |x| x.rope_i(cos, sin),
        )
    }

    of_two! {
        /// The sum, shapes broadcast.
        fn add = broadcast_add;

        /// The difference, shapes broadcast.
        fn sub = broadcast_sub;

        /// The product, shapes broadcast.
        fn mul = broadcast_mul;

        /// The quotient, shapes broadcast.
        fn div = broadcast_div;

        /// The larger element, shapes broadcast.
        fn maximum = broadcast_maximum;

        /// The smaller element, shapes broadcast.
        fn minimum = broadcast_minimum;

        /// The product of matrices, leading dimensions broadcast.
        fn matmul = broadcast_matmul;
    }

    composed! {
        /// The dimensions in another order.
        fn permute(dims: &[usize]) = |x| x.permute(&dims[..])?;
        /// Repeated along dimensions of size 1.
        fn broadcast_as(dims: &[usize]) = |x| x.broadcast_as(&dims[..])?;
        /// The sum over dimensions, which stay with the size 1.
        fn sum_keepdim(dims: &[usize]) = |x| x.sum_keepdim(&dims[..])?;
        /// The mean over dimensions, which stay with the size 1.
        fn mean_keepdim(dims: &[usize]) = |x| x.mean_keepdim(&dims[..])?;
        /// Mean cross entropy of logits `[.., classes]` and class indexes: [`fp8_candle::ops::cross_entropy`].
        fn cross_entropy(targets: &Tensor) = |x| ops::cross_entropy(x, &targets)?;
        /// A range of a dimension.
        fn narrow(dim: usize, start: usize, len: usize) = |x| x.narrow(dim, start, len)?;

        /// Without a dimension of size 1.
        fn squeeze(dim: usize) = |x| x.squeeze(dim)?;

        /// With one more dimension, of size 1.
        fn unsqueeze(dim: usize) = |x| x.unsqueeze(dim)?;

        /// Zeros before and after a dimension.
        fn pad(dim: usize, before: usize, after: usize) = |x| x.pad_with_zeros(dim, before, after)?;

        /// Times a constant.
        fn mul_constant(constant: f64) = |x| (x * constant)?;

        /// Plus a constant.
        fn add_constant(constant: f64) = |x| (x + constant)?;

        /// The negative.
        fn neg() = |x| x.neg()?;

        /// The magnitude.
        fn abs() = |x| x.abs()?;

        /// e to the power of each element.
        fn exp() = |x| x.exp()?;

        /// The natural logarithm.
        fn log() = |x| x.log()?;

        /// The sine.
        fn sin() = |x| x.sin()?;

        /// The cosine.
        fn cos() = |x| x.cos()?;

        /// The hyperbolic tangent.
        fn tanh() = |x| x.tanh()?;

        /// The error function.
        fn erf() = |x| x.erf()?;

        /// `1 / (1 + e^-x)`.
        fn sigmoid() = |x| candle_nn::ops::sigmoid(x)?;

        /// The square root.
        fn sqrt() = |x| x.sqrt()?;

        /// One over the square root.
        fn rsqrt() = |x| x.sqrt()?.recip()?;

        /// One over each element.
        fn recip() = |x| x.recip()?;

        /// The square.
        fn square() = |x| x.sqr()?;

        /// The positive part.
        fn relu() = |x| x.relu()?;

        /// GELU in its tanh form: [`fp8_candle::ops::gelu`].
        fn gelu() = |x| Activation::Gelu.apply(x)?;

        /// `x * sigmoid(x)`.
        fn silu() = |x| Activation::Silu.apply(x)?;

        /// The largest element along a dimension, which stays with the size 1.
        fn max_keepdim(dim: usize) = |x| x.max_keepdim(dim)?;

        /// The sum of all elements.
        fn sum_all() = |x| x.sum_all()?;

        /// The mean of all elements.
        fn mean_all() = |x| x.mean_all()?;

        /// Softmax over a dimension.
        fn softmax(dim: usize) = |x| {
            let last = x.rank().saturating_sub(1);
            match dim == last {
                true => ops::softmax_last_dim(x)?,
                false => ops::softmax_last_dim(&x.transpose(dim, last)?)?.transpose(dim, last)?,
            }
        };

        /// Causal softmax of attention scores `[.., t, s]`: [`fp8_candle::ops::causal_softmax`].
        fn causal_softmax(softmax_scale: f64) = |x| ops::causal_softmax(x, softmax_scale)?;

        /// The largest element of each square of `size` pixels of images `[b, c, h, w]`: [`fp8_candle::ops::max_pool2d`].
        fn max_pool2d(size: usize) = |x| ops::max_pool2d(x, size)?;
    }

    /// Casts the value on its way forward; nothing for plain tensors, whose recipe casts. See [`Scaled::cast_on_forward`].
    ///
    /// # Errors
    /// If a device fails.
    fn cast_on_forward(&self, dtype: ScaledDType) -> Result<Self> {
        self.if_scaled(|x| Ok(x.cast_on_forward(dtype)?))
    }

    /// Casts the cotangent on its way back; nothing for plain tensors. See [`Scaled::cast_on_backward`].
    ///
    /// # Errors
    /// If a device fails.
    fn cast_on_backward(&self, dtype: ScaledDType) -> Result<Self> {
        self.if_scaled(|x| Ok(x.cast_on_backward(dtype)?))
    }

    /// Moves size between data and scale; nothing for plain tensors. See [`Scaled::rescale`].
    ///
    /// # Errors
    /// If a device fails.
    fn rescale(&self, norm: Norm, direction: Direction) -> Result<Self> {
        self.if_scaled(|x| Ok(x.rescale(norm, direction)?))
    }

    /// The result of `scaled` for a scaled array; other arrays are returned unchanged.
    #[doc(hidden)]
    fn if_scaled(&self, scaled: impl FnOnce(&Scaled) -> Result<Scaled>) -> Result<Self> {
        self.by_kind(|x| Ok(x.clone()), scaled, |x| Ok(x.clone()))
    }
}
