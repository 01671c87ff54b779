//! Self-attention with its projections.

mod forward;

use super::block::{Block, calls};
use super::config::{AttentionConfig, TransformerConfig};
use super::inputs::LayerInputs;
use super::key_values::KeyValues;
use super::layer_norm_linear::norm;
use super::{LayerNorm, Linear};
use crate::Fp8Module;
use crate::array::Array;
use crate::error::Result;
use candle_core::Tensor;
use candle_nn::VarBuilder;
use fp8_core::setters;

/// The projections of queries, keys and values.
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
#[non_exhaustive]
pub enum Projections {
    /// One layer for each of queries, keys and values.
    Separate {
        /// `[heads * head_dim, hidden_size]`
        query: Linear,
        /// `[kv_heads * head_dim, hidden_size]`
        key: Linear,
        /// `[kv_heads * head_dim, hidden_size]`
        value: Linear,
    },
    /// One layer, whose results are all queries, then all keys, then all values.
    Fused(Linear),
}

impl Projections {
    fn layers(&self) -> Vec<&Linear> {
        match self {
            Self::Separate { query, key, value } => vec![query, key, value],
            Self::Fused(qkv) => vec![qkv],
        }
    }
}

/// Self-attention with its projections, and with or without a norm before them, as one node.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{Device, Tensor};
/// use fp8::nn::{AttentionConfig, LayerInputs, Linear, MultiheadAttention, Projections};
/// let linear = |out, input| -> candle_core::Result<Linear> {
///     Ok(Linear::new(Tensor::randn(0f32, 1., (out, input), &Device::Cpu)?, None))
/// };
/// // Four heads of queries share two of keys and values.
/// let config = AttentionConfig::new(4, 8).with_num_key_value_heads(2).with_causal(true);
/// let qkv = Projections::Separate { query: linear(32, 16)?, key: linear(16, 16)?, value: linear(16, 16)? };
/// let attention = MultiheadAttention::new(None, qkv, linear(16, 32)?, config);
/// let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// assert_eq!(attention.forward(&x, &LayerInputs::default())?.dims(), [2, 5, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
pub struct MultiheadAttention {
    norm: Option<LayerNorm>,
    qkv: Projections,
    out: Linear,
    #[fp8(skip)]
    config: AttentionConfig,
    single_node: bool,
}

impl MultiheadAttention {
    /// Attention with these layers.
    pub fn new(
        norm: impl Into<Option<LayerNorm>>,
        qkv: Projections,
        out: Linear,
        config: AttentionConfig,
    ) -> Self {
        Self {
            norm: norm.into(),
            qkv,
            out,
            config,
            single_node: true,
        }
    }

    /// Heads, masks and dropout.
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The projections of queries, keys and values.
    pub fn projections(&self) -> &Projections {
        &self.qkv
    }

    /// The projection of results.
    pub fn out(&self) -> &Linear {
        &self.out
    }
}

calls!(tokens MultiheadAttention);

setters! { MultiheadAttention:
    /// A copy that is one node of the graph, or one node per layer.
    with_single_node(single_node: bool);
}

/// A [`MultiheadAttention`] with a norm before it and the parameters `norm`, `q_proj`, `k_proj` and `v_proj` (or `qkv_proj`)
/// and `o_proj`.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn multihead_attention(
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<MultiheadAttention> {
    let norm = norm(config.hidden_size, config, vb.pp("norm"))?;
    attention(Some(norm), config, vb)
}

/// The projections under `vb`, after `norm`.
pub(super) fn attention(
    norm: Option<LayerNorm>,
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<MultiheadAttention> {
    let d = config.hidden_size;
    let own = &config.attention;
    own.check_heads(&vb.prefix())?;
    let q = own.num_attention_heads * own.head_dim;
    let kv = own.num_key_value_heads * own.head_dim;
    let linear = |input, out, name| crate::nn::linear_b(input, out, config.bias, vb.pp(name));
    let qkv = match config.fused_qkv {
        true => Projections::Fused(linear(d, q + 2 * kv, "qkv_proj")?),
        false => Projections::Separate {
            query: linear(d, q, "q_proj")?,
            key: linear(d, kv, "k_proj")?,
            value: linear(d, kv, "v_proj")?,
        },
    };
    let out = linear(q, d, "o_proj")?;
    Ok(MultiheadAttention::new(norm, qkv, out, own.clone()))
}
