//! A new token of each of several sequences, each over a cache of its own.

use super::batch::cached_attention;
use super::tokens::{CachedTokens, OP, check_cache, no_dropout, no_gradient};
use crate::base::check::check_float;
use crate::base::data::attention::Attention;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, shape_error};
use crate::base::profile::{Kind, enter};
use crate::device::cpu;
use crate::ops::attention::AttentionOptions;
use candle_core::{DType, Tensor};

/// The cache of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct CachedSequence<'a> {
    /// Its keys, `[1, kv_heads, capacity, head_dim]`.
    pub k: CachedTokens<'a>,
    /// Its values, with the shape of the keys.
    pub v: CachedTokens<'a>,
    /// Tokens in the cache, the new one included.
    pub keys: usize,
}

/// [`cached_attention`] of one token for each of `sequences`, which may differ in their lengths and capacities. Each gets the result
/// that it gets alone, to the bit.
///
/// # Shapes
/// `q` `[sequences, heads, 1, head_dim]` in f32, bf16 or f16. The result has the shape and dtype of `q`.
///
/// # Errors
/// As [`cached_attention`], and if there are not as many sequences as rows of `q`.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::ops::{AttentionOptions, CachedSequence, CachedTokens, cached_attention_each};
///
/// let caches = [64, 16].map(|capacity| Tensor::randn(0f32, 1.0, (1, 2, capacity, 16), &Device::Cpu));
/// let sequences = caches.iter().zip([40, 3]).map(|(cache, keys)| {
///     let tokens = CachedTokens::HighPrecision(cache.as_ref().unwrap());
///     CachedSequence { k: tokens, v: tokens, keys }
/// });
/// let q = Tensor::randn(0f32, 1.0, (2, 8, 1, 16), &Device::Cpu)?;
/// let y = cached_attention_each(&q, &sequences.collect::<Vec<_>>(), &AttentionOptions::default())?;
/// assert_eq!(y.dims(), [2, 8, 1, 16]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn cached_attention_each(
    q: &Tensor,
    sequences: &[CachedSequence<'_>],
    options: &AttentionOptions,
) -> Result<Tensor> {
    check_float(OP, "q", q)?;
    no_dropout(options)?;
    let heads_and_size = match *q.dims() {
        [rows, heads, 1, head_dim] if rows == sequences.len() => Some((heads, head_dim)),
        _ => None,
    };
    let Some((heads, head_dim)) = heads_and_size else {
        let expected = format!("[{}, heads, 1, head_dim]", sequences.len());
        return Err(shape_error(OP, "q", expected, q.dims()));
    };
    if sequences.is_empty()
        || q.elem_count() == 0
        || !q.device().is_cpu()
        || q.dtype() == DType::F64
        || options.products.any()
    {
        let rows = sequences.iter().enumerate().map(|(row, sequence)| {
            let CachedSequence { k, v, keys } = *sequence;
            cached_attention(&q.narrow(0, row, 1)?, k, v, keys, options)
        });
        let rows = rows.collect::<Result<Vec<_>>>()?;
        return match rows.is_empty() {
            true => Ok(q.zeros_like()?),
            false => Ok(Tensor::cat(&rows, 0)?),
        };
    }
    let _scope = enter(Kind::Attention);
    no_gradient([q])?;
    crate::base::simd::check()?;
    let options = options.clone().with_causal(true);
    let mut calls = vec![];
    for CachedSequence { k, v, keys } in sequences {
        no_gradient([k.tensor(), v.tensor()])?;
        let kv_heads = check_cache((k, v), ([1, heads, 1, head_dim], q.dtype()), *keys)?;
        let sizes = [1, heads, kv_heads, 1, *keys, head_dim];
        let call = Attention::of(sizes, q.dtype(), &options, false)?;
        calls.push((call, [k.side(), v.side()]));
    }
    let kv_heads = calls[0].0.kv_heads;
    if let Some((_, [other, _])) = calls.iter().find(|(call, _)| call.kv_heads != kv_heads) {
        let expected = format!("{kv_heads} heads, as in the first cache");
        return Err(shape_error(OP, "k", expected, other.tensor.dims()));
    }
    tensor_of(cpu::cached_attention(q, &calls)?, q.shape())
}
