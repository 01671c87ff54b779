//! What attention computes: within a node, and layer by layer.

use super::{MultiheadAttention, Projections};
use crate::error::{LayerError, Result};
use crate::nn::ops::AttentionOptions;
use crate::nn::transformer::config::{AttentionConfig, check_dropout, unfit};
use crate::nn::transformer::inputs::LayerInputs;
use crate::nn::transformer::key_values::KeyValues;
use crate::nn::transformer::{Wide, WideNode, node};
use crate::scaled::{Array, Layer};
use fp8_scaled::{Direction, Norm};

impl MultiheadAttention {
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

    fn options(&self, inputs: &LayerInputs<'_>) -> AttentionOptions {
        let seed = inputs.seed(self.out.path(), 0);
        (self.config).options(inputs.key_lengths.clone(), seed)
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
            false => Err(LayerError::Heads {
                path: self.out.path().unwrap_or_default().to_string(),
                expected,
                got: features.to_vec(),
            }
            .into()),
        }
    }

    pub(in crate::nn::transformer) fn in_node(
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

    pub(in crate::nn::transformer) fn composed<A: Array>(
        &self,
        x: &A,
        inputs: &LayerInputs<'_>,
        cache: Option<&mut KeyValues<A>>,
    ) -> Result<A> {
        node::noting_failure(|| self.layer_by_layer(x, inputs, cache))
    }

    fn layer_by_layer<A: Array>(
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
                    None => return Err(fp8_scaled::Error::NoScaleRule { op: "rope_i" }.into()),
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
