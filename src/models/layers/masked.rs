//! Attention with an additive mask.

use crate::models::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::ops;

/// Attention in f32 with `mask` added to the scores: `[tokens, keys]` or `[batch, 1, 1, keys]`.
pub(crate) fn masked_attention(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    mask: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let (batch, heads, tokens, d) = q.dims4()?;
    let (_, kv_heads, keys, _) = k.dims4()?;
    let rows = heads / kv_heads * tokens;
    let wide = |x: &Tensor| x.to_dtype(DType::F32)?.contiguous();
    let scores = wide(q)?
        .reshape((batch, kv_heads, rows, d))?
        .matmul(&wide(k)?.t()?)?
        .reshape((batch, heads, tokens, keys))?;
    let scores = (scores * scale)?.broadcast_add(mask)?;
    let p = ops::softmax_last_dim(&scores)?.reshape((batch, kv_heads, rows, keys))?;
    let y = p.matmul(&wide(v)?)?.reshape((batch, heads, tokens, d))?;
    Ok(y.to_dtype(q.dtype())?)
}
