//! `candle_nn::ops`, with a backward pass where candle-nn's have none, and the fused operations of `fp8_candle::ops` that
//! candle-nn does not have.

pub use candle_nn::ops::*;
pub use fp8_candle::ops::{Activation, AttentionDropout, AttentionOptions, CrossEntropyOptions};

use super::attention::{Scores, causal_bias};
use candle_core::{Result, Tensor};

/// Operations of `fp8_candle::ops` with candle's `Result`, which the forward passes of models return.
macro_rules! with_candles_result {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $type:ty),*);)*) => {$(
        $(#[$doc])*
        ///
        /// # Errors
        /// If shapes, dtypes or devices are incompatible; `fp8_candle::ops` has the same with an error that can be matched.
        pub fn $name($($arg: $type),*) -> Result<Tensor> {
            Ok(fp8_candle::ops::$name($($arg),*)?)
        }
    )*};
}

with_candles_result! {
    /// Softmax over the last dimension of `[.., n]`, differentiable: [`fp8_candle::ops::softmax_last_dim`].
    softmax_last_dim(xs: &Tensor);
    /// Causal softmax of attention scores `[.., t, s]` times `softmax_scale`: [`fp8_candle::ops::causal_softmax`].
    causal_softmax(scores: &Tensor, softmax_scale: f64);
    /// Rotary position embedding, half-split: [`fp8_candle::ops::rope`].
    rope(xs: &Tensor, cos: &Tensor, sin: &Tensor);
    /// Rotary position embedding, interleaved: [`fp8_candle::ops::rope_i`].
    rope_i(xs: &Tensor, cos: &Tensor, sin: &Tensor);
    /// GELU in its tanh form, in one pass: [`fp8_candle::ops::gelu`].
    gelu(xs: &Tensor);
    /// The largest element of each square of `size` pixels of images `[b, c, h, w]`: [`fp8_candle::ops::max_pool2d`].
    max_pool2d(xs: &Tensor, size: usize);
    /// Attention of `[b, h, t, d]` without a matrix of scores in memory: [`fp8_candle::ops::attention`].
    attention(q: &Tensor, k: &Tensor, v: &Tensor, options: AttentionOptions);
    /// Attention of `[b, t, h, d]`: [`fp8_candle::ops::attention_tokens_first`].
    attention_tokens_first(q: &Tensor, k: &Tensor, v: &Tensor, options: AttentionOptions);
    /// Mean cross entropy of `logits` `[.., classes]` and class indexes `targets` `[..]`, an f32 scalar:
    /// [`fp8_candle::ops::cross_entropy`].
    cross_entropy(logits: &Tensor, targets: &Tensor);
    /// Cross entropy with options: [`fp8_candle::ops::cross_entropy_with`].
    cross_entropy_with(logits: &Tensor, targets: &Tensor, options: CrossEntropyOptions);
}

/// `x / sqrt(mean(x^2) + eps) * alpha` over the last dimension: `xs` `[.., d]`, `alpha` `[d]`, of one dtype.
///
/// # Errors
/// If shapes, dtypes or devices are incompatible.
pub fn rms_norm(xs: &Tensor, alpha: &Tensor, eps: f32) -> Result<Tensor> {
    Ok(fp8_candle::ops::rms_norm(xs, alpha, eps.into())?)
}

/// `(x - mean) / sqrt(variance + eps) * alpha + beta` over the last dimension: `xs` `[.., d]`, `alpha` and `beta` `[d]`, of
/// one dtype.
///
/// # Errors
/// If shapes, dtypes or devices are incompatible.
pub fn layer_norm(xs: &Tensor, alpha: &Tensor, beta: &Tensor, eps: f32) -> Result<Tensor> {
    Ok(fp8_candle::ops::layer_norm(
        xs,
        alpha,
        Some(beta),
        eps.into(),
    )?)
}

/// Scaled dot-product attention, on every device and differentiable; candle-nn's has a kernel for Metal only, and no
/// backward pass.
///
/// `softmax(q k^T * scale + mask) v`; with `softcapping` other than 1, the scaled products become
/// `softcapping * tanh(products / softcapping)` before the mask. `do_causal` hides the keys after each query, so that the last
/// query sees every key.
///
/// # Shapes
/// `q` `[b, h, tq, d]`, `k` `[b, h_kv, tk, d]`, `v` `[b, h_kv, tk, d_v]` with `h` a multiple of `h_kv`; `mask` broadcasts to
/// `[b, h, tq, tk]`. Result `[b, h, tq, d_v]`.
///
/// # Errors
/// If the shapes are incompatible.
pub fn sdpa(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: Option<&Tensor>,
    do_causal: bool,
    scale: f32,
    softcapping: f32,
) -> Result<Tensor> {
    let (tq, tk) = (q.dim(2)?, k.dim(2)?);
    if mask.is_none() && softcapping == 1. && v.dims() == k.dims() && (!do_causal || tk >= tq) {
        let options = AttentionOptions::default()
            .with_causal(do_causal)
            .with_softmax_scale(f64::from(scale));
        return attention(q, k, v, options);
    }
    let mut bias: Vec<Tensor> = mask.cloned().into_iter().collect();
    if do_causal {
        let first = tk as i64 - tq as i64;
        bias.push(causal_bias((tq, tk), first, q.device())?);
    }
    let scores = Scores {
        scale: scale.into(),
        softcap: (softcapping != 1.).then(|| softcapping.into()),
        bias,
    };
    scores.attend(q, k, v)?.to_dtype(q.dtype())
}
