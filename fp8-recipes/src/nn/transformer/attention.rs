//! Self-attention with its projections.

use super::config::{AttentionConfig, TransformerConfig, check_dropout, unfit};
use super::inputs::LayerInputs;
use super::key_values::KeyValues;
use super::layer_norm_linear::norm;
use super::node;
use super::{LayerNorm, Linear, Wide, WideNode};
use crate::error::{Error, Result};
use crate::scaled::{Array, Layer};
use crate::{Fp8Module, Visitor};
use candle_core::Tensor;
use candle_nn::VarBuilder;
use fp8_candle::scaled::{Direction, Norm};

/// The projections of queries, keys and values.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn::*;
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # let config = TransformerConfig::new(16, 2);
/// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let qkv = Projections::Fused(linear(16, 48, vb.pp("qkv"))?);
/// # let _ = qkv;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Projections {
    /// A layer each.
    Separate {
        /// `[heads * head_dim, hidden_size]`
        query: Linear,
        /// `[kv_heads * head_dim, hidden_size]`
        key: Linear,
        /// As the keys'.
        value: Linear,
    },
    /// One layer: all queries, then all keys, then all values.
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
/// use candle_core::{Device, Tensor};
/// use fp8_recipes::nn::{AttentionConfig, LayerInputs, Linear, MultiheadAttention, Projections};
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
#[derive(Debug, Clone)]
pub struct MultiheadAttention {
    norm: Option<LayerNorm>,
    qkv: Projections,
    out: Linear,
    config: AttentionConfig,
    single_node: bool,
}

impl MultiheadAttention {
    /// Attention with these layers.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// let qkv = Projections::Fused(linear(16, 48, vb.pp("qkv"))?);
    /// let attention = MultiheadAttention::new(None, qkv, linear(16, 16, vb.pp("out"))?, AttentionConfig::new(2, 8));
    /// assert_eq!(attention.forward(&x, &LayerInputs::default())?.dims(), [2, 5, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// The same module as one node of the graph, or as a node per layer.
    pub fn with_single_node(self, single_node: bool) -> Self {
        Self {
            single_node,
            ..self
        }
    }

    /// Heads and masks.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let attention = multihead_attention(&config, vb)?;
    /// # let inputs = LayerInputs::default();
    /// assert_eq!(attention.config().head_dim, 8);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn config(&self) -> &AttentionConfig {
        &self.config
    }

    /// The projections of queries, keys and values.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let attention = multihead_attention(&config, vb)?;
    /// # let inputs = LayerInputs::default();
    /// assert!(matches!(attention.projections(), Projections::Separate { .. }));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn projections(&self) -> &Projections {
        &self.qkv
    }

    /// The projection of results.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let attention = multihead_attention(&config, vb)?;
    /// # let inputs = LayerInputs::default();
    /// assert_eq!(attention.out().path(), Some("o_proj"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn out(&self) -> &Linear {
        &self.out
    }

    pub(super) fn fits(&self) -> bool {
        let linears = self.qkv.layers().into_iter().chain([&self.out]);
        self.single_node && node::fits(&self.norm, linears)
    }

    /// What each token attends to. x: `[batch, tokens, hidden_size]`, as the result, of x's dtype.
    ///
    /// # Errors
    /// If x has another shape, heads and features of the layers do not fit each other, and those of the layers.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let attention = multihead_attention(&config, vb)?;
    /// # let inputs = LayerInputs::default();
    /// assert_eq!(attention.forward(&x, &inputs)?.dims(), [2, 5, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward(&self, x: &Tensor, inputs: &LayerInputs<'_>) -> Result<Tensor> {
        if !self.fits() {
            return self.composed(x, inputs, None);
        }
        node::run("multihead-attention", false, x, |node, x| {
            self.in_node(node, x, inputs)
        })
    }

    /// [`MultiheadAttention::forward`] on plain or scaled tensors.
    ///
    /// # Errors
    /// As [`MultiheadAttention::forward`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let attention = multihead_attention(&config, vb)?;
    /// # let inputs = LayerInputs::default();
    /// let y: Tensor = attention.forward_array(&x, &inputs)?;
    /// assert_eq!(y.dims(), [2, 5, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_array<A: Array>(&self, x: &A, inputs: &LayerInputs<'_>) -> Result<A> {
        match x.as_tensor() {
            Some(x) => A::from_tensor(self.forward(x, inputs)?),
            None => self.composed(x, inputs, None),
        }
    }

    /// [`MultiheadAttention::forward_array`] of tokens that follow those in `cache`, which gets theirs.
    ///
    /// # Errors
    /// As [`MultiheadAttention::forward`].
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let attention = multihead_attention(&config, vb)?;
    /// # let inputs = LayerInputs::default();
    /// let mut cache = KeyValues::default();
    /// let first: Tensor = attention.forward_cached(&x, &inputs, &mut cache)?;
    /// assert_eq!(first.dims(), [2, 5, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_cached<A: Array>(
        &self,
        x: &A,
        inputs: &LayerInputs<'_>,
        cache: &mut KeyValues<A>,
    ) -> Result<A> {
        self.composed(x, inputs, Some(cache))
    }

    /// Features of queries and of keys.
    fn widths(&self) -> [usize; 2] {
        let AttentionConfig {
            num_attention_heads,
            num_key_value_heads,
            head_dim,
            ..
        } = self.config;
        [
            num_attention_heads * head_dim,
            num_key_value_heads * head_dim,
        ]
    }

    fn options(&self, inputs: &LayerInputs<'_>) -> crate::nn::ops::AttentionOptions {
        let seed = inputs.seed(self.out.path(), 0);
        (self.config).options(inputs.key_lengths.clone(), seed, node::in_fp8())
    }

    /// The batch and the tokens of x; fails for options and inputs that do not fit them. `past`: tokens before those of x.
    fn checked(&self, x: &[usize], inputs: &LayerInputs<'_>, past: usize) -> Result<[usize; 2]> {
        let [batch, tokens, _] = node::dims3("multihead attention", x)?;
        let (path, config) = (self.out.path().unwrap_or_default(), &self.config);
        config.check_heads(path)?;
        let what = "AttentionConfig::attention_dropout";
        check_dropout(path, what, config.attention_dropout)?;
        if let Some(lengths) = &inputs.key_lengths
            && (lengths.len() != batch || lengths.iter().any(|&length| length > past + tokens))
        {
            let got = format!("{lengths:?}");
            let expected = format!("{batch} lengths of at most {} tokens", past + tokens);
            return Err(unfit(path, "LayerInputs::key_lengths", got, expected));
        }
        let dims = [tokens, config.head_dim / 2];
        if let Some((cos, sin)) = inputs.rope
            && (!config.head_dim.is_multiple_of(2)
                || [cos, sin].iter().any(|table| table.dims() != dims))
        {
            let got = format!("{:?} and {:?}", cos.dims(), sin.dims());
            let expected = format!(
                "cos and sin {dims:?}: the tokens, and half of an even head_dim, here {}",
                config.head_dim
            );
            return Err(unfit(path, "LayerInputs::rope", got, expected));
        }
        Ok([batch, tokens])
    }

    /// Checks that a projection gives as many features as its heads have.
    fn check(&self, features: &[usize]) -> Result<()> {
        let [q, kv] = self.widths();
        let expected = match self.qkv {
            Projections::Separate { .. } => vec![q, kv, kv],
            Projections::Fused(_) => vec![q + 2 * kv],
        };
        match features == expected {
            true => Ok(()),
            false => Err(Error::Heads {
                path: self.out.path().unwrap_or_default().to_string(),
                expected,
                got: features.to_vec(),
            }),
        }
    }

    pub(super) fn in_node(
        &self,
        node: &mut WideNode,
        x: &Wide,
        inputs: &LayerInputs<'_>,
    ) -> Result<Wide> {
        let [batch, tokens] = self.checked(x.dims(), inputs, 0)?;
        let AttentionConfig {
            num_attention_heads: heads,
            num_key_value_heads: kv_heads,
            head_dim,
            rope_interleaved,
            ..
        } = self.config;
        let normed = match &self.norm {
            Some(layer) => node::norm(node, layer, x)?,
            None => x.clone(),
        };
        let projected = node::linears(node, &self.qkv.layers(), &normed)?;
        let features: Vec<usize> = projected
            .iter()
            .map(|y| y.dims().last().copied().unwrap_or(0))
            .collect();
        self.check(&features)?;
        let projected = match projected.as_slice() {
            [qkv] => {
                let [q, kv] = self.widths();
                node.split(qkv, &[q, kv, kv])?
            }
            _ => projected,
        };
        let mut parts = vec![];
        for (y, heads) in projected.iter().zip([heads, kv_heads, kv_heads]) {
            parts.push(node.reshape(y, &[batch, tokens, heads, head_dim])?);
        }
        let [q, k, v] = parts.as_slice() else {
            return Err(candle_core::Error::Msg("attention needs three projections".into()).into());
        };
        let y = match inputs.rope {
            None => node.attention([q, k, v], &self.options(inputs))?,
            Some((cos, sin)) => {
                let q = node.rope(q, cos, sin, rope_interleaved)?;
                let k = node.rope(k, cos, sin, rope_interleaved)?;
                node.attention([&q, &k, v], &self.options(inputs))?
            }
        };
        let y = node.reshape(&y, &[batch, tokens, heads * head_dim])?;
        node::linear(node, &self.out, &y)
    }

    pub(super) fn composed<A: Array>(
        &self,
        x: &A,
        inputs: &LayerInputs<'_>,
        cache: Option<&mut KeyValues<A>>,
    ) -> Result<A> {
        let past = cache.as_ref().map_or(0, |cache| cache.len());
        let [batch, tokens] = self.checked(x.dims(), inputs, past)?;
        let head_dim = self.config.head_dim;
        let normed = match &self.norm {
            Some(norm) => norm.apply(x)?,
            None => x.clone(),
        };
        let projected = (self.qkv.layers().into_iter())
            .map(|layer| layer.apply(&normed))
            .collect::<Result<Vec<A>>>()?;
        let features: Vec<usize> = projected
            .iter()
            .map(|y| y.dims().last().copied().unwrap_or(0))
            .collect();
        self.check(&features)?;
        let [q, k, v] = match projected.as_slice() {
            [q, k, v] => [q.clone(), k.clone(), v.clone()],
            [qkv] => {
                let [q, kv] = self.widths();
                let part = |start, len| qkv.narrow(2, start, len)?.contiguous();
                [part(0, q)?, part(q, kv)?, part(q + kv, kv)?]
            }
            _ => {
                return Err(
                    candle_core::Error::Msg("attention needs three projections".into()).into(),
                );
            }
        };
        let heads = |y: &A| -> Result<A> {
            let count = y.dims().last().copied().unwrap_or(0) / head_dim.max(1);
            let y = y.reshape(&[batch, tokens, count, head_dim])?;
            y.transpose(1, 2)?.contiguous()
        };
        // Gradients of queries and keys are much smaller than those around them: a scaled run gives them a scale of their own.
        let turned = |y: &A| -> Result<A> {
            let y = heads(y)?;
            let y = match inputs.rope {
                None => y,
                Some((cos, sin)) if self.config.rope_interleaved => match y.as_tensor() {
                    Some(y) => A::from_tensor(crate::nn::ops::rope_i(y, cos, sin)?)?,
                    None => return Err(fp8_candle::Error::NoScaleRule { op: "rope_i" }.into()),
                },
                Some((cos, sin)) => y.rope(cos, sin)?,
            };
            y.rescale(Norm::L2, Direction::Backward)
        };
        let (q, mut k, mut v) = (turned(&q)?, turned(&k)?, heads(&v)?);
        if let Some(cache) = cache {
            (k, v) = cache.append(k, v, self.config.sliding_window)?;
        }
        let y = A::attention(&q, &k, &v, self.options(inputs))?;
        let y = y.transpose(1, 2)?;
        self.out
            .apply(&y.reshape(&[batch, tokens, self.widths()[0]])?)
    }
}

impl Fp8Module for MultiheadAttention {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.norm.visit(visitor);
        for layer in self.qkv.layers() {
            layer.visit(visitor);
        }
        self.out.visit(visitor);
    }
}

/// A [`MultiheadAttention`] with a norm before it and the parameters `norm`, `q_proj`, `k_proj` and `v_proj` (or `qkv_proj`)
/// and `o_proj`.
///
/// # Errors
/// If a tensor is missing or has another shape.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn::*;
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # let config = TransformerConfig::new(16, 2);
/// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let attention = multihead_attention(&config, vb)?;
/// assert_eq!(attention.forward(&x, &LayerInputs::default())?.dims(), [2, 5, 16]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn multihead_attention(
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<MultiheadAttention> {
    let norm = norm(config.hidden_size, config, vb.pp("norm"))?;
    attention(Some(norm), config, vb)
}

/// The projections under `vb`, behind `norm`.
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
