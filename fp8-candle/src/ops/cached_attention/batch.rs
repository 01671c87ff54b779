//! The last tokens of a batch over the cache of the batch.

use super::tokens::{CachedTokens, OP, check_cache, no_dropout, no_gradient};
use crate::base::check::check_float;
use crate::base::data::attention::Attention;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, shape_error};
use crate::base::profile::{Kind, enter};
use crate::device::cpu;
use crate::ops::attention::{AttentionOptions, attention};
use candle_core::{DType, Tensor};

/// Causal attention of the last tokens over a cache that holds them and all before them, for inference: to the bit what
/// [`attention`] of the first `keys` keys and values gives, however many of the tokens are queries.
///
/// ```text
/// y_i = sum_j softmax_j(softmax_scale * q_i . k_j) v_j    over j <= keys - tokens + i
/// ```
///
/// On the CPU the cache is read in place, and FP8 codes are decoded on the way. The bits of a query's result depend neither on the
/// other queries, the number of threads or the capacity of the cache, nor on keys that the query does not see, as long as these are
/// finite: tokens may come one by one, in parts or all at once. Elsewhere, in f64, and with [`AttentionOptions::products`] in FP8, the
/// first `keys` tokens are brought to the dtype of `q`, codes on the host, and given to [`attention`], where every row has its own scale.
///
/// # Shapes
/// `q` `[batch, heads, tokens, head_dim]` in f32, bf16 or f16 (or f64, over a cache in f64); `k` and `v` as [`CachedTokens`] says,
/// with `tokens <= keys <= capacity`; `heads` a multiple of `kv_heads`. The result has the shape and dtype of `q`.
///
/// # Errors
/// If shapes, dtypes, devices or options do not fit each other, or a gradient is tracked, which would be lost.
/// [`Error::Dropout`](crate::Error::Dropout) if the options have dropout with another probability than 0.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::ops::{AttentionOptions, CachedTokens, cached_attention};
///
/// let cache = Tensor::randn(0f32, 1.0, (1, 2, 64, 16), &Device::Cpu)?; // room for 64 tokens
/// let q = Tensor::randn(0f32, 1.0, (1, 8, 1, 16), &Device::Cpu)?; // one token, 4 heads share one of the cache
/// let tokens = CachedTokens::HighPrecision(&cache);
/// let y = cached_attention(&q, tokens, tokens, 10, &AttentionOptions::default())?; // ten tokens are there
/// assert_eq!(y.dims(), [1, 8, 1, 16]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn cached_attention(
    q: &Tensor,
    k: CachedTokens<'_>,
    v: CachedTokens<'_>,
    keys: usize,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let _scope = enter(Kind::Attention);
    check_float(OP, "q", q)?;
    no_dropout(options)?;
    no_gradient([q, k.tensor(), v.tensor()])?;
    let &[batch, heads, tokens, head_dim] = q.dims() else {
        return Err(shape_error(
            OP,
            "q",
            "[batch, heads, tokens, head_dim]",
            q.dims(),
        ));
    };
    let sizes = [batch, heads, tokens, head_dim];
    let kv_heads = check_cache((&k, &v), (sizes, q.dtype()), keys)?;
    let options = options.clone().with_causal(true);
    let sizes = [batch, heads, kv_heads, tokens, keys, head_dim];
    let call = Attention::of(sizes, q.dtype(), &options, false)?;
    if q.elem_count() == 0 || keys == 0 {
        return Ok(q.zeros_like()?);
    }
    if !q.device().is_cpu() || q.dtype() == DType::F64 || options.products.any() {
        let (k, v) = (
            k.dequantize(keys, q.dtype())?,
            v.dequantize(keys, q.dtype())?,
        );
        return attention(q, &k, &v, options);
    }
    crate::base::simd::check()?;
    let y = cpu::cached_attention(q, &[(call, [k.side(), v.side()])])?;
    tensor_of(y, q.shape())
}
