//! What attention computes.

use super::{MultiheadAttention, Projections};
use crate::array::{Array, Layer};
use crate::autocast::current;
use crate::error::{LayerError, Result};
use crate::nn::linear::joint;
use crate::nn::ops::AttentionOptions;
use crate::nn::transformer::block::{Block, missing};
use crate::nn::transformer::config::{AttentionConfig, check_dropout, unfit};
use crate::nn::transformer::inputs::LayerInputs;
use crate::nn::transformer::key_values::KeyValues;
use crate::nn::{LayerNorm, Linear};
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
        let products = current().map(|context| context.attention(self.out.fp8_state().as_deref()));
        (self.config)
            .options(inputs.key_lengths.clone(), seed)
            .with_products(products.unwrap_or_default())
    }

    /// Batch size and number of tokens of x; an error for options and inputs that do not fit them. `past`: tokens before those of x.
    fn checked(&self, x: &[usize], inputs: &LayerInputs<'_>, past: usize) -> Result<[usize; 2]> {
        let &[batch, tokens, _] = x else {
            return Err(fp8_candle::Error::Shape {
                op: "multihead attention",
                what: "x",
                expected: "[batch, tokens, features]".into(),
                got: x.to_vec(),
            }
            .into());
        };
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
}

impl Block for MultiheadAttention {
    const NAME: &'static str = "multihead-attention";

    fn norms(&self) -> Vec<&LayerNorm> {
        self.norm.iter().collect()
    }

    fn linears(&self) -> Vec<&Linear> {
        self.qkv.layers().into_iter().chain([&self.out]).collect()
    }

    fn wants_single_node(&self) -> bool {
        self.single_node
    }

    fn body<A: Array>(
        &self,
        x: &A,
        inputs: &LayerInputs<'_>,
        cache: Option<&mut KeyValues<A>>,
    ) -> Result<A> {
        let past = (cache.as_ref()).map_or(0, |cache| cache.len(self.config.sliding_window));
        let [batch, tokens] = self.checked(x.dims(), inputs, past)?;
        let head_dim = self.config.head_dim;
        let mut projected = joint(&self.qkv.layers(), &self.norm.apply(x)?)?;
        let features = projected.iter().map(|y| y.dims().last().copied());
        self.check(&features.map(Option::unwrap_or_default).collect::<Vec<_>>())?;
        let [width, kv_width] = self.widths();
        if let [qkv] = projected.as_slice() {
            projected = qkv.split(&[width, kv_width, kv_width])?;
        }
        let [q, k, v] = projected.as_slice() else {
            return missing("attention needs three projections");
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
                Some((cos, sin)) if self.config.rope_interleaved => y.rope_i(cos, sin)?,
                Some((cos, sin)) => y.rope(cos, sin)?,
            };
            y.rescale(Norm::L2, Direction::Backward)
        };
        let (q, k, v) = (turned(q)?, turned(k)?, heads(v)?);
        let options = self.options(inputs);
        let y = match cache {
            None => A::attention(&q, &k, &v, options)?,
            Some(cache) => cache.attention(&q, [k, v], options)?,
        };
        let y = y.transpose(1, 2)?.reshape(&[batch, tokens, width])?;
        self.out.apply(&y)
    }
}
