//! What a model computes on: plain tensors or scaled ones.

use super::channels::ChannelLayer;
use super::sealed::Sealed;
use crate::error::Result;
use crate::nn;
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::{self, AttentionOptions};
use fp8_scaled::{Direction, Norm, Scaled, ScaledDType};

/// Declares the operations once: documentation, the method of the trait, and what it is for a plain tensor. For [`Scaled`] it is the
/// method of the same name.
macro_rules! array {
    ($(
        $(#[$doc:meta])*
        fn $name:ident($($arg:ident: $type:ty),*) = |$x:ident| $plain:expr;
    )*) => {
        /// A tensor that a model computes on: [`Tensor`], plain or under a recipe's guard, or [`Scaled`].
        ///
        /// A model whose forward pass is generic over `A: Array` is written once. On plain tensors every operation is the one
        /// that the model would call otherwise, with the same bits; on scaled ones it is the method of [`Scaled`], which documents
        /// its rule. Where an operation needs more than tensors have in common, a model calls it on either type by itself.
        pub trait Array: Sealed + Clone + std::fmt::Debug {
            /// The sizes of the dimensions.
            fn dims(&self) -> &[usize];

            /// Where the data are.
            fn device(&self) -> &Device;

            /// The value as a plain f32 tensor outside any graph.
            ///
            /// # Errors
            /// If a device fails.
            fn value(&self) -> Result<Tensor>;

            /// Tensors behind one another along `dim`.
            ///
            /// # Errors
            /// If shapes do not fit.
            fn cat(parts: &[&Self], dim: usize) -> Result<Self>;

            /// Attention of `[b, h, t, d]`: [`fp8_candle::ops::attention`].
            ///
            /// # Errors
            /// If shapes do not fit.
            fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self>;

            /// The tensor, if this is a plain one.
            #[doc(hidden)]
            fn as_tensor(&self) -> Option<&Tensor>;

            /// A plain tensor as it is.
            #[doc(hidden)]
            fn from_tensor(x: Tensor) -> Result<Self>;

            /// What [`nn::Linear`] computes.
            #[doc(hidden)]
            fn linear(layer: &nn::Linear, x: &Self) -> Result<Self>;

            /// What [`nn::Conv2d`] computes.
            #[doc(hidden)]
            fn conv2d(layer: &nn::Conv2d, x: &Self) -> Result<Self>;

            /// What a layer over channels computes.
            #[doc(hidden)]
            fn over_channels(layer: ChannelLayer<'_>, x: &Self) -> Result<Self>;

            /// What [`nn::LayerNorm`] computes.
            #[doc(hidden)]
            fn layer_norm(layer: &nn::LayerNorm, x: &Self) -> Result<Self>;

            /// What [`nn::Activation`] computes.
            #[doc(hidden)]
            fn activation(layer: &nn::Activation, x: &Self) -> Result<Self>;

            /// What [`nn::Embedding`] computes.
            #[doc(hidden)]
            fn embedding(layer: &nn::Embedding, indexes: &Tensor) -> Result<Self>;

            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// If shapes or dtypes do not fit.
                fn $name(&self, $($arg: $type),*) -> Result<Self>;
            )*
        }

        impl Array for Tensor {
            fn dims(&self) -> &[usize] {
                Tensor::dims(self)
            }

            fn device(&self) -> &Device {
                Tensor::device(self)
            }

            fn value(&self) -> Result<Tensor> {
                Ok(self.detach().to_dtype(DType::F32)?)
            }

            fn cat(parts: &[&Self], dim: usize) -> Result<Self> {
                Ok(Tensor::cat(parts, dim)?)
            }

            fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self> {
                Ok(ops::attention(q, k, v, options)?)
            }

            fn as_tensor(&self) -> Option<&Tensor> {
                Some(self)
            }

            fn from_tensor(x: Tensor) -> Result<Self> {
                Ok(x)
            }

            fn linear(layer: &nn::Linear, x: &Self) -> Result<Self> {
                layer.try_forward(x)
            }

            fn conv2d(layer: &nn::Conv2d, x: &Self) -> Result<Self> {
                layer.try_forward(x)
            }

            fn over_channels(layer: ChannelLayer<'_>, x: &Self) -> Result<Self> {
                super::channels::plain(layer, x)
            }

            fn layer_norm(layer: &nn::LayerNorm, x: &Self) -> Result<Self> {
                Ok(candle_core::Module::forward(layer, x)?)
            }

            fn activation(layer: &nn::Activation, x: &Self) -> Result<Self> {
                Ok(candle_core::Module::forward(layer, x)?)
            }

            fn embedding(layer: &nn::Embedding, indexes: &Tensor) -> Result<Self> {
                Ok(candle_core::Module::forward(layer, indexes)?)
            }

            $(
                fn $name(&self, $($arg: $type),*) -> Result<Self> {
                    let $x = self;
                    $(let $arg = $arg;)*
                    Ok($plain)
                }
            )*
        }

        impl Array for Scaled {
            fn dims(&self) -> &[usize] {
                Scaled::dims(self)
            }

            fn device(&self) -> &Device {
                Scaled::device(self)
            }

            fn value(&self) -> Result<Tensor> {
                Ok(self.to_tensor(DType::F32)?)
            }

            fn cat(parts: &[&Self], dim: usize) -> Result<Self> {
                Ok(Scaled::cat(parts, dim)?)
            }

            fn attention(q: &Self, k: &Self, v: &Self, options: AttentionOptions) -> Result<Self> {
                Ok(Scaled::attention(q, k, v, options)?)
            }

            fn as_tensor(&self) -> Option<&Tensor> {
                None
            }

            fn from_tensor(x: Tensor) -> Result<Self> {
                Ok(fp8_scaled::as_scaled(&x, None)?)
            }

            fn linear(layer: &nn::Linear, x: &Self) -> Result<Self> {
                super::layer::linear(layer, x)
            }

            fn conv2d(layer: &nn::Conv2d, x: &Self) -> Result<Self> {
                super::layer::conv2d(layer, x)
            }

            fn over_channels(layer: ChannelLayer<'_>, x: &Self) -> Result<Self> {
                super::channels::scaled(layer, x)
            }

            fn layer_norm(layer: &nn::LayerNorm, x: &Self) -> Result<Self> {
                super::layer::layer_norm(layer, x)
            }

            fn activation(layer: &nn::Activation, x: &Self) -> Result<Self> {
                super::layer::activation(layer, x)
            }

            fn embedding(layer: &nn::Embedding, indexes: &Tensor) -> Result<Self> {
                super::layer::embedding(layer, indexes)
            }

            $(
                fn $name(&self, $($arg: $type),*) -> Result<Self> {
                    Ok(Scaled::$name(self, $($arg),*)?)
                }
            )*
        }
    };
}

array! {
    /// The same elements in another shape.
    fn reshape(dims: &[usize]) = |x| x.reshape(dims)?;

    /// Row by row in memory. Scaled tensors see to that themselves.
    fn contiguous() = |x| x.contiguous()?;

    /// Two dimensions exchanged.
    fn transpose(first: usize, second: usize) = |x| x.transpose(first, second)?;

    /// The dimensions in another order.
    fn permute(dims: &[usize]) = |x| x.permute(dims)?;

    /// A range of a dimension.
    fn narrow(dim: usize, start: usize, len: usize) = |x| x.narrow(dim, start, len)?;

    /// Repeated along dimensions of size 1.
    fn broadcast_as(dims: &[usize]) = |x| x.broadcast_as(dims)?;

    /// Without a dimension of size 1.
    fn squeeze(dim: usize) = |x| x.squeeze(dim)?;

    /// With a dimension of size 1 more.
    fn unsqueeze(dim: usize) = |x| x.unsqueeze(dim)?;

    /// Zeros before and after a dimension.
    fn pad(dim: usize, before: usize, after: usize) = |x| x.pad_with_zeros(dim, before, after)?;

    /// The sum, shapes broadcast.
    fn add(other: &Self) = |x| x.broadcast_add(other)?;

    /// The difference, shapes broadcast.
    fn sub(other: &Self) = |x| x.broadcast_sub(other)?;

    /// The product, shapes broadcast.
    fn mul(other: &Self) = |x| x.broadcast_mul(other)?;

    /// The quotient, shapes broadcast.
    fn div(other: &Self) = |x| x.broadcast_div(other)?;

    /// Times a constant.
    fn mul_constant(constant: f64) = |x| (x * constant)?;

    /// Plus a constant.
    fn add_constant(constant: f64) = |x| (x + constant)?;

    /// The larger element, shapes broadcast.
    fn maximum(other: &Self) = |x| x.broadcast_maximum(other)?;

    /// The smaller element, shapes broadcast.
    fn minimum(other: &Self) = |x| x.broadcast_minimum(other)?;

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
    fn gelu() = |x| ops::gelu(x)?;

    /// `x * sigmoid(x)`.
    fn silu() = |x| x.silu()?;

    /// The sum over dimensions, which stay with the size 1.
    fn sum_keepdim(dims: &[usize]) = |x| x.sum_keepdim(dims)?;

    /// The mean over dimensions, which stay with the size 1.
    fn mean_keepdim(dims: &[usize]) = |x| x.mean_keepdim(dims)?;

    /// The largest element along a dimension, which stays with the size 1.
    fn max_keepdim(dim: usize) = |x| x.max_keepdim(dim)?;

    /// The sum of all elements.
    fn sum_all() = |x| x.sum_all()?;

    /// The mean of all elements.
    fn mean_all() = |x| x.mean_all()?;

    /// The product of matrices, leading dimensions broadcast.
    fn matmul(other: &Self) = |x| x.broadcast_matmul(other)?;

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

    /// Rotary position embedding, half-split, of `[b, h, t, d]`: [`fp8_candle::ops::rope`].
    fn rope(cos: &Tensor, sin: &Tensor) = |x| ops::rope(x, cos, sin)?;
    /// Zeros instead of a share `p` of the elements, the others times `1 / (1 - p)`; which, follows from `seed` and the place.
    fn dropout(p: f64, seed: u64) = |x| ops::dropout(x, p, seed)?;

    /// Mean cross entropy of logits `[.., classes]` and class indexes: [`fp8_candle::ops::cross_entropy`].
    fn cross_entropy(targets: &Tensor) = |x| ops::cross_entropy(x, targets)?;

    /// The largest element of each square of `size` pixels of images `[b, c, h, w]`.
    fn max_pool2d(size: usize) = |x| x.max_pool2d(size)?;

    /// Casts the value on its way forward; nothing for plain tensors, whose recipe casts. See [`Scaled::cast_on_forward`].
    fn cast_on_forward(dtype: ScaledDType) = |x| { let _ = dtype; x.clone() };

    /// Casts the cotangent on its way back; nothing for plain tensors. See [`Scaled::cast_on_backward`].
    fn cast_on_backward(dtype: ScaledDType) = |x| { let _ = dtype; x.clone() };

    /// Moves size between data and scale; nothing for plain tensors. See [`Scaled::rescale`].
    fn rescale(norm: Norm, direction: Direction) = |x| { let _ = (norm, direction); x.clone() };
}
