//! Attention composed of differentiable operations.

use candle_core::{DType, Device, Result, Tensor};
use fp8_candle::ops::softmax_last_dim;

/// How the products of queries and keys become the input of the softmax.
pub(in crate::nn) struct Scores {
    /// What the products are multiplied by.
    pub(in crate::nn) scale: f64,
    /// `cap * tanh(product / cap)`.
    pub(in crate::nn) softcap: Option<f64>,
    /// Added afterwards; each broadcasts to `[b, h, tq, tk]`. Negative infinity hides a key.
    pub(in crate::nn) bias: Vec<Tensor>,
}

impl Scores {
    /// `q` `[b, h, tq, d]`, `k` `[b, h_k, tk, d]`, `v` `[b, h_v, tk, d_v]` with `h` a multiple of `h_k` and `h_v`. The result
    /// `[b, h, tq, d_v]` is f64 for f64 and f32 otherwise; 0 for a query that sees no key.
    pub(in crate::nn) fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let dtype = match q.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let heads = q.dim(1)?;
        let wide = |x: &Tensor| x.to_dtype(dtype)?.contiguous();
        let (k, v) = (repeated(&wide(k)?, heads)?, repeated(&wide(v)?, heads)?);
        let mut scores = (wide(q)?.matmul(&k.t()?)? * self.scale)?;
        if let Some(cap) = self.softcap {
            scores = ((scores / cap)?.tanh()? * cap)?;
        }
        for bias in &self.bias {
            scores = scores.broadcast_add(&bias.to_dtype(dtype)?)?;
        }
        if self.bias.is_empty() {
            return softmax_last_dim(&scores)?.matmul(&v);
        }
        // The softmax of a row without a visible key is NaN, also in the backward pass.
        let largest = scores.detach().max_keepdim(3)?;
        let blind = largest
            .eq(f64::NEG_INFINITY)?
            .broadcast_as(scores.shape())?;
        let zeros = scores.zeros_like()?;
        let scores = blind.where_cond(&zeros, &scores)?;
        let p = blind.where_cond(&zeros, &softmax_last_dim(&scores)?)?;
        p.matmul(&v)
    }
}

/// Each head of `x` `[b, h_kv, t, d]` repeated for its group of queries.
fn repeated(x: &Tensor, heads: usize) -> Result<Tensor> {
    let (b, kv_heads, t, d) = x.dims4()?;
    if kv_heads == heads {
        return Ok(x.clone());
    }
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        candle_core::bail!(
            "{heads} heads of queries are not a multiple of {kv_heads} heads of keys"
        );
    }
    x.unsqueeze(2)?
        .broadcast_as((b, kv_heads, heads / kv_heads, t, d))?
        .reshape((b, heads, t, d))
}

/// `[tq, tk]`: hides the keys after `i + first` from query `i`.
pub(in crate::nn) fn causal_bias(
    (tq, tk): (usize, usize),
    first: i64,
    device: &Device,
) -> Result<Tensor> {
    bias((1, tq, tk), device, |_, i, j| match j > i + first {
        true => f32::NEG_INFINITY,
        false => 0.,
    })
}

/// `[heads, tq, tk]` of `f(head, query, key)`.
pub(super) fn bias(
    (heads, tq, tk): (usize, usize, usize),
    device: &Device,
    f: impl Fn(usize, i64, i64) -> f32,
) -> Result<Tensor> {
    let mut values = Vec::with_capacity(heads * tq * tk);
    for head in 0..heads {
        for i in 0..tq as i64 {
            values.extend((0..tk as i64).map(|j| f(head, i, j)));
        }
    }
    Tensor::from_vec(values, (heads, tq, tk), device)
}
