//! The last tokens of a batch over the cache of the batch.

use super::head::{Part, Sizes};
use super::tokens::{CachedTokens, FEW, OP, check_cache, no_gradient};
use crate::base::check::check_float;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, shape_error};
use crate::base::profile::{Kind, enter};
use crate::device::cpu::elements::{par_blocks, storage};
use crate::ops::attention::{AttentionOptions, attention};
use candle_core::{DType, Tensor};

/// Causal attention of the last tokens over a cache that holds them and all before them, for inference.
///
/// ```text
/// y_i = sum_j softmax_j(softmax_scale * q_i . k_j) v_j    over j <= keys - tokens + i
/// ```
///
/// On the CPU keys and values are read once for all queries of a head, and FP8 codes are decoded on the way; sums and the
/// softmax are in f32. The bits depend neither on the number of threads nor on the capacity of the cache. Elsewhere the
/// first `keys` tokens are decoded and given to [`attention`].
///
/// # Shapes
/// `q` `[batch, heads, tokens, head_dim]` in f32, bf16 or f16; `k` and `v` as [`CachedTokens`] says, with
/// `tokens <= keys <= capacity`; `heads` a multiple of `kv_heads`. The result has the shape and dtype of `q`.
///
/// # Errors
/// If shapes, dtypes or devices do not fit each other, or a gradient is tracked, which would be lost.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::ops::{CachedTokens, cached_attention};
///
/// let cache = Tensor::randn(0f32, 1.0, (1, 2, 64, 16), &Device::Cpu)?; // room for 64 tokens
/// let q = Tensor::randn(0f32, 1.0, (1, 8, 1, 16), &Device::Cpu)?; // one token, 4 heads share one of the cache
/// let tokens = CachedTokens::HighPrecision(&cache);
/// let y = cached_attention(&q, tokens, tokens, 10, None)?; // ten tokens are there
/// assert_eq!(y.dims(), [1, 8, 1, 16]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn cached_attention(
    q: &Tensor,
    k: CachedTokens<'_>,
    v: CachedTokens<'_>,
    keys: usize,
    softmax_scale: Option<f64>,
) -> Result<Tensor> {
    let _scope = enter(Kind::Attention);
    check_float(OP, "q", q)?;
    no_gradient([q, k.tensor(), v.tensor()])?;
    let &[batch, heads, tokens, head_dim] = q.dims() else {
        return Err(shape_error(
            OP,
            "q",
            "[batch, heads, tokens, head_dim]",
            q.dims(),
        ));
    };
    let kv_heads = check_cache((&k, &v), [batch, heads, tokens, head_dim], keys)?;
    if q.elem_count() == 0 || keys == 0 {
        return Ok(q.zeros_like()?);
    }
    let softmax_scale = softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt());
    if !q.device().is_cpu() {
        let options = AttentionOptions::default().with_causal(true);
        let options = options.with_softmax_scale(softmax_scale);
        let (k, v) = (
            k.dequantize(keys, DType::F32)?,
            v.dequantize(keys, DType::F32)?,
        );
        let y = attention(&q.to_dtype(DType::F32)?, &k, &v, options)?;
        return Ok(y.to_dtype(q.dtype())?);
    }
    crate::base::simd::check()?;
    let q_wide = q.to_dtype(DType::F32)?.contiguous()?;
    let q_wide = q_wide.flatten_all()?.to_vec1::<f32>()?;
    let capacity = k.tensor().dims()[2];
    let (k_storage, _) = k.tensor().storage_and_layout();
    let (v_storage, _) = v.tensor().storage_and_layout();
    let (k, v) = (Part::new(&k, &k_storage)?, Part::new(&v, &v_storage)?);
    let sizes = Sizes {
        kv_heads,
        rows: heads / kv_heads * tokens,
        tokens,
        keys,
        capacity,
        head_dim,
        softmax_scale: softmax_scale as f32,
    };
    let mut y = vec![0f32; q_wide.len()];
    let block = sizes.rows * head_dim;
    let work = 2 * y.len() * keys;
    let run = |start: usize, y: &mut [f32]| {
        for (i, y) in y.chunks_mut(block).enumerate() {
            let pair = start / block + i;
            let q = &q_wide[pair * block..(pair + 1) * block];
            sizes.head(pair, q, &k, &v, y);
        }
    };
    match work < FEW {
        true => run(0, &mut y),
        false => {
            par_blocks(&mut y, block, run);
        }
    }
    Ok(tensor_of(storage(y), q.shape())?.to_dtype(q.dtype())?)
}
