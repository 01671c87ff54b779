//! Tensors, layers of candle_nn, and types that hold no parameters.

use super::{Fp8Module, LayerKind, Visitor, show_batch_norm};
use candle_core::{DType, Device, Shape, Tensor, Var};
use std::marker::PhantomData;

/// Shown without a name; [`nn::NamedTensor`](crate::nn::NamedTensor) gives it one.
impl Fp8Module for Tensor {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.tensor(None, self);
    }
}

/// Shown without a name; [`nn::NamedTensor`](crate::nn::NamedTensor) gives it one.
impl Fp8Module for Var {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.tensor(None, self.as_tensor());
    }
}

/// Layers that expose their tensors but have no names for them.
macro_rules! weight_and_bias {
    ($($type:ident $(: $kind:ident)?),*) => {
        $(impl Fp8Module for candle_nn::$type {
            fn visit(&self, visitor: &mut dyn Visitor) {
                $(visitor.candle_layer(LayerKind::$kind, self.weight());)?
                visitor.tensor(None, self.weight());
                if let Some(bias) = self.bias() {
                    visitor.tensor(None, bias);
                }
            }
        })*
    };
}

weight_and_bias!(
    Linear: Linear,
    LayerNorm,
    Conv1d: Convolution,
    Conv2d: Convolution,
    ConvTranspose1d: Convolution,
    ConvTranspose2d: Convolution
);

macro_rules! one_tensor {
    ($($type:ident: $tensor:ident),*) => {
        $(impl Fp8Module for candle_nn::$type {
            fn visit(&self, visitor: &mut dyn Visitor) {
                visitor.tensor(None, self.$tensor());
            }
        })*
    };
}

one_tensor!(RmsNorm: weight, Embedding: embeddings, PReLU: weight);

/// Weight, bias and the running statistics, which a checkpoint holds too.
impl Fp8Module for candle_nn::BatchNorm {
    fn visit(&self, visitor: &mut dyn Visitor) {
        show_batch_norm(visitor, None, self);
    }
}

/// Types without parameters.
macro_rules! nothing {
    ($($type:ty),* $(,)?) => {
        $(impl $crate::Fp8Module for $type {
            fn visit(&self, _: &mut dyn $crate::Visitor) {}
        })*
    };
}
pub(crate) use nothing;

nothing!(
    (),
    bool,
    char,
    u8,
    u16,
    u32,
    u64,
    u128,
    usize,
    i8,
    i16,
    i32,
    i64,
    i128,
    isize,
    f32,
    f64,
    half::bf16,
    half::f16,
    str,
    String,
    DType,
    Device,
    Shape,
    tracing::Span,
    candle_nn::Activation,
    candle_nn::Dropout,
    candle_nn::BatchNormConfig,
    candle_nn::Conv1dConfig,
    candle_nn::Conv2dConfig,
    candle_nn::ConvTranspose1dConfig,
    candle_nn::ConvTranspose2dConfig,
    candle_nn::LayerNormConfig,
    candle_nn::Init,
    candle_nn::LSTMConfig,
    candle_nn::GRUConfig,
    candle_nn::ops::Identity,
    std::sync::atomic::AtomicBool,
    std::sync::atomic::AtomicU32,
    std::sync::atomic::AtomicU64,
    std::sync::atomic::AtomicUsize,
    std::time::Duration,
);

// Cached keys and values are not parameters.
nothing!(
    candle_nn::kv_cache::Cache,
    candle_nn::kv_cache::KvCache,
    candle_nn::kv_cache::RotatingCache,
    candle_nn::kv_cache::RotatingKvCache,
    candle_nn::kv_cache::ConcatKvCache,
    candle_nn::kv_cache::InterleavedKvCache,
    candle_nn::kv_cache::RawInterleavedKvCache,
    candle_nn::kv_cache::ScatteredKvCache,
    candle_nn::kv_cache::ScatteredCacheBuilder,
);

impl<T: ?Sized> Fp8Module for PhantomData<T> {
    fn visit(&self, _: &mut dyn Visitor) {}
}

/// A closure: the tensors that it captures cannot be seen, so they are missing in an export.
impl Fp8Module for candle_nn::Func<'_> {
    fn visit(&self, _: &mut dyn Visitor) {}
}

/// A closure: the tensors that it captures cannot be seen, so they are missing in an export.
impl Fp8Module for candle_nn::FuncT<'_> {
    fn visit(&self, _: &mut dyn Visitor) {}
}
