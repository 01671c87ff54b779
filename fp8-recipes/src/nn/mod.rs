//! A twin of `candle_nn`: everything that it exports, under the same names and, but for two items, with the same signatures, with what FP8
//! and training need in place of some of it.
//!
//! In a file written for candle, `use fp8_recipes::nn as candle_nn;` is the whole swap. It changes this:
//!
//! | item | here |
//! |---|---|
//! | [`Linear`], [`linear()`], .. | computes in FP8 inside a guard once it is prepared; candle-nn's layer otherwise |
//! | [`LayerNorm`], [`RmsNorm`] | differentiable |
//! | [`ops`]: `softmax_last_dim`, `rms_norm`, `layer_norm`, `sdpa` | differentiable |
//! | [`rotary_emb`]: `rope`, `rope_i`, `rope_thd` | differentiable |
//! | [`attention`], [`cpu_flash_attention`], [`varlen_attention`] | differentiable where a gradient is tracked |
//! | [`kv_cache`] | gradients reach the keys and values, or an error says that they would not |
//! | [`moe`] | an error where a gradient would be lost |
//! | [`loss::cross_entropy`] | in one pass |
//! | [`Conv1d`], [`Conv2d`], [`ConvTranspose1d`], [`ConvTranspose2d`] | compute in FP8 inside a guard once they are prepared |
//! | [`Conv1d`], [`ConvTranspose1d`] | right gradients, which candle 0.11.1 does not compute for batches |
//! | [`BatchNorm`] | dtypes may differ; [`fuse_batch_norm`], [`fold_batch_norms`] of a whole model |
//! | [`Embedding`], [`GroupNorm`], [`LSTM`], [`Sequential`], .. | show their parameters by name |
//!
//! Beside candle-nn's layers there are [`DenseGeneral`] and [`Dense`], flax's, which sum over any axes; the modules of
//! [`transformer`]; and [`LoraLinear`].
//!
//! candle-nn's own versions of the rows that say "differentiable" have no backward pass: the layers before them silently receive
//! no gradient, and the loss still falls. [`check_gradients`](crate::check_gradients) finds such cuts.
//!
//! Two signatures differ: [`Linear::weight`] returns a `Result`, since the weight of a layer loaded in FP8 is computed when
//! asked for; and [`Sequential::add`] takes modules that show their layers, so that a closure goes to [`Sequential::add_fn`].

mod activation_layer;
pub mod attention;
pub mod batch_norm;
mod call;
mod checkpoint;
pub mod conv;
pub mod cpu_flash_attention;
mod dense;
pub mod embedding;
pub mod group_norm;
mod identity;
pub mod kv_cache;
pub mod layer_norm;
pub mod linear;
mod lora;
pub mod loss;
pub mod moe;
mod named_tensor;
mod operators;
pub mod ops;
pub mod parallel;
pub mod rnn;
pub mod rotary_emb;
pub(crate) mod scaled_parameter;
pub mod sequential;
pub mod transformer;
pub mod varlen_attention;

pub use candle_nn::*;

pub use batch_norm::{
    BatchNorm, adjacent_batch_norms, batch_norm, fold_batch_norms, fuse_batch_norm,
};
pub use checkpoint::{checkpoint, checkpoint_many};
pub use conv::{
    Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, conv_transpose1d, conv_transpose1d_no_bias,
    conv_transpose2d, conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use dense::{
    AxisNames, AxisRules, Dense, DenseConfig, DenseGeneral, FanMode, InitDistribution, Initializer,
    dense_general,
};
pub use embedding::{Embedding, embedding};
pub use fp8_candle::{InputScaling, StaticWeight};
pub use group_norm::{GroupNorm, group_norm};
pub use layer_norm::{LayerNorm, RmsNorm, layer_norm, layer_norm_no_bias, rms_norm};
pub use linear::{Linear, linear, linear_b, linear_no_bias};
pub use lora::{LoraConfig, LoraLinear, LoraUpdate};
pub use named_tensor::NamedTensor;
pub use operators::{Add, Div, Matmul, Mul};
pub use parallel::{
    LinearAxes, ParallelDense, ParallelLinear, column_parallel_linear, row_parallel_linear,
};
pub use rnn::{GRU, LSTM, gru, lstm};
pub use sequential::{Sequential, seq};
pub use transformer::{
    AttentionConfig, KeyValues, LayerInputs, LayerNormLinear, LayerNormMlp, MlpInput,
    MultiheadAttention, NormKind, NormPlacement, Projections, TransformerConfig, TransformerLayer,
    layer_norm_linear, layer_norm_mlp, multihead_attention, transformer_layer,
};

use candle_core::Tensor;

/// An error if one of `tensors` tracks a gradient, which `op` would lose.
fn no_gradient_through(op: &'static str, tensors: &[&Tensor]) -> candle_core::Result<()> {
    match tensors.iter().any(|tensor| tensor.track_op()) {
        true => Err(crate::Error::from(crate::LayerError::NoBackward { op }).into()),
        false => Ok(()),
    }
}
