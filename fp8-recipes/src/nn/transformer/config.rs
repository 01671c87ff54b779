//! The options of transformer modules.

use super::super::ops::AttentionOptions;
use crate::error::{Error, LayerError, Result};
use candle_core::DType;
use fp8_candle::ops::{Activation, AttentionDropout};
use fp8_core::setters;

/// The error of an option that does not fit.
pub(in crate::nn) fn unfit(
    path: &str,
    what: &'static str,
    got: impl ToString,
    expected: impl ToString,
) -> Error {
    LayerError::TransformerOption {
        path: path.to_string(),
        what,
        got: got.to_string(),
        expected: expected.to_string(),
    }
    .into()
}

/// Fails unless `probability` is at least 0 and below 1.
pub(in crate::nn) fn check_dropout<P: Copy + Into<f64> + ToString>(
    path: &str,
    what: &'static str,
    probability: P,
) -> Result<()> {
    match (0.0..1.0).contains(&probability.into()) {
        true => Ok(()),
        false => {
            let expected = "a probability of at least 0 and below 1";
            Err(unfit(path, what, probability, expected))
        }
    }
}

/// The norm of a transformer module.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum NormKind {
    /// With mean and bias.
    #[default]
    LayerNorm,
    /// Without mean and bias.
    RmsNorm,
}

/// Where the norms of a layer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum NormPlacement {
    /// Before attention and MLP: `x + f(norm(x))`.
    #[default]
    Pre,
    /// After the residual: `norm(x + f(x))`.
    Post,
}

/// How a [`MultiheadAttention`](super::MultiheadAttention) attends.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::nn::AttentionConfig;
/// let config = AttentionConfig::new(8, 64).with_num_key_value_heads(2).with_causal(true).with_sliding_window(4096);
/// assert_eq!(config.num_key_value_heads, 2);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct AttentionConfig {
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads, a divisor of the number of query heads (Transformer Engine's `num_gqa_groups`).
    pub num_key_value_heads: usize,
    /// Features per head (`kv_channels`).
    pub head_dim: usize,
    /// Whether a token attends only to itself and earlier tokens.
    pub causal: bool,
    /// How many tokens a token attends to at most, itself included; implies `causal`.
    pub sliding_window: Option<usize>,
    /// The factor on dot products; `1 / sqrt(head_dim)` by default.
    pub softmax_scale: Option<f64>,
    /// The share of attention probabilities that training drops.
    pub attention_dropout: f64,
    /// Whether rotary positions rotate neighbouring features instead of halves.
    pub rope_interleaved: bool,
    /// The dtype to which queries, keys, values and probabilities are rounded before products; None does not round them. A guard
    /// does not change this, so that a model computes the same in training, in evaluation and loaded from its file. `BF16` is
    /// what mixed precision uses: on processors with bf16 products, and on GPUs, f32 attention then takes a fraction of the time
    /// and keeps half of the bytes for the backward pass.
    pub operands: Option<DType>,
}

impl AttentionConfig {
    /// Attention to all tokens, with as many key and value heads as query heads.
    pub fn new(num_attention_heads: usize, head_dim: usize) -> Self {
        Self {
            num_attention_heads,
            num_key_value_heads: num_attention_heads,
            head_dim,
            causal: false,
            sliding_window: None,
            softmax_scale: None,
            attention_dropout: 0.,
            rope_interleaved: false,
            operands: None,
        }
    }

    /// Fails for impossible numbers of heads in the module at `path`.
    pub(super) fn check_heads(&self, path: &str) -> Result<()> {
        let (heads, kv_heads) = (self.num_attention_heads, self.num_key_value_heads);
        if heads == 0 || self.head_dim == 0 {
            return Err(unfit(
                path,
                "AttentionConfig::head_dim",
                format!("{} of {heads} heads", self.head_dim),
                "one head or more, of one feature or more; heads that divide the hidden size have one by default",
            ));
        }
        if self.sliding_window == Some(0) {
            let expected = "one token or more, or None for all";
            return Err(unfit(path, "AttentionConfig::sliding_window", 0, expected));
        }
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(unfit(
                path,
                "AttentionConfig::num_key_value_heads",
                kv_heads,
                format!("a divisor of the {heads} heads of queries"),
            ));
        }
        // At most three times the features of queries, with those of keys and values.
        match heads
            .checked_mul(self.head_dim)
            .and_then(|width| width.checked_mul(3))
        {
            Some(_) => Ok(()),
            None => Err(unfit(
                path,
                "AttentionConfig::head_dim",
                format!("{} of {heads} heads", self.head_dim),
                "sizes whose product fits into a usize",
            )),
        }
    }

    /// The options of one call.
    pub(super) fn options(
        &self,
        key_lengths: Option<Vec<usize>>,
        seed: Option<u64>,
    ) -> AttentionOptions {
        let dropout = seed.filter(|_| self.attention_dropout != 0.);
        AttentionOptions::default()
            .with_causal(self.causal)
            .with_window(self.sliding_window)
            .with_softmax_scale(self.softmax_scale)
            .with_key_lengths(key_lengths)
            .with_dropout(dropout.map(|seed| AttentionDropout::new(self.attention_dropout, seed)))
            .with_operands(self.operands)
    }
}

setters! { AttentionConfig:
    with_sliding_window(sliding_window: into Option<usize>);
    with_softmax_scale(softmax_scale: into Option<f64>);
    with_operands(operands: into Option<DType>);
    with_num_key_value_heads(num_key_value_heads: usize);
    with_causal(causal: bool);
    with_attention_dropout(attention_dropout: f64);
    with_rope_interleaved(rope_interleaved: bool);
}

/// The sizes and options from which [`transformer_layer`](super::transformer_layer) and its parts are built.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::nn::{NormKind, TransformerConfig, ops::Activation};
/// // A layer of Llama.
/// let config = TransformerConfig::new(4096, 32)
///     .with_intermediate_size(11008)
///     .with_norm(NormKind::RmsNorm)
///     .with_hidden_act(Activation::SwiGlu)
///     .with_bias(false)
///     .with_causal(true);
/// assert_eq!(config.attention.head_dim, 128);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TransformerConfig {
    /// Features per token.
    pub hidden_size: usize,
    /// Features within the MLP (`ffn_hidden_size`); 4 times the hidden size by default.
    pub intermediate_size: usize,
    /// Heads, masks and dropout of attention probabilities.
    pub attention: AttentionConfig,
    /// LayerNorm or RMSNorm (`normalization`).
    pub norm: NormKind,
    /// Before attention and MLP, or after the residual (`output_layernorm`). Whole layers only: the norm of a part comes first.
    pub norm_placement: NormPlacement,
    /// Added to the variance.
    pub norm_eps: f64,
    /// The activation between the projections of the MLP (`activation`).
    pub hidden_act: Activation,
    /// Whether linear layers have biases.
    pub bias: bool,
    /// Whether queries, keys and values are one projection (`fuse_qkv_params`), `qkv_proj`, queries first.
    pub fused_qkv: bool,
    /// Whether gate and value of a gated activation are one projection, `gate_up_proj`, the gate first.
    pub fused_gate_up: bool,
    /// The share of the results of attention and MLP that training drops before the residual. Whole layers only.
    pub hidden_dropout: f64,
    /// See [`TransformerConfig::with_recomputation`]. Whole layers and [`LayerNormMlp`](super::LayerNormMlp) only; for others use
    /// [`checkpoint`](crate::nn::checkpoint).
    pub recomputation: bool,
}

impl TransformerConfig {
    /// A layer as in GPT-2: LayerNorm before, GELU, biases. Heads that do not divide the hidden size have a `head_dim` of 0, which
    /// no module accepts: give them another with [`TransformerConfig::with_attention`].
    pub fn new(hidden_size: usize, num_attention_heads: usize) -> Self {
        let head_dim = match num_attention_heads {
            0 => 0,
            heads if hidden_size.is_multiple_of(heads) => hidden_size / heads,
            _ => 0,
        };
        Self {
            hidden_size,
            intermediate_size: hidden_size.saturating_mul(4),
            attention: AttentionConfig::new(num_attention_heads, head_dim),
            norm: NormKind::LayerNorm,
            norm_placement: NormPlacement::Pre,
            norm_eps: 1e-5,
            hidden_act: Activation::Gelu,
            bias: true,
            fused_qkv: false,
            fused_gate_up: false,
            hidden_dropout: 0.,
            recomputation: false,
        }
    }

    /// A copy with or without a causal mask.
    pub fn with_causal(self, causal: bool) -> Self {
        let attention = self.attention.clone().with_causal(causal);
        Self { attention, ..self }
    }
}

setters! { TransformerConfig:
    with_intermediate_size(intermediate_size: usize);
    with_attention(attention: AttentionConfig);
    with_norm(norm: NormKind);
    with_norm_placement(norm_placement: NormPlacement);
    with_norm_eps(norm_eps: f64);
    with_hidden_act(hidden_act: Activation);
    with_bias(bias: bool);
    with_fused_qkv(fused_qkv: bool);
    with_fused_gate_up(fused_gate_up: bool);
    with_hidden_dropout(hidden_dropout: f64);
    /// A copy that does or does not recompute tensors in the backward pass, bit for bit: the MLP's inner ones and the FP8 codes
    /// of the norms' results, from tensors that are kept anyway. It costs one more product and keeps less than half of the bytes.
    /// Has no effect without FP8 codes.
    with_recomputation(recomputation: bool);
}
