//! A new token of each of several sequences, each over a cache of its own.

use super::batch::cached_attention;
use super::head::{Part, Sizes};
use super::tokens::{CachedTokens, FEW, OP, check_cache, no_gradient};
use crate::base::check::check_float;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, shape_error};
use crate::base::profile::{Kind, enter};
use crate::device::cpu::elements::{par_blocks, storage};
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
/// use fp8_candle::ops::{CachedSequence, CachedTokens, cached_attention_each};
///
/// let caches = [64, 16].map(|capacity| Tensor::randn(0f32, 1.0, (1, 2, capacity, 16), &Device::Cpu));
/// let sequences = caches.iter().zip([40, 3]).map(|(cache, keys)| {
///     let tokens = CachedTokens::HighPrecision(cache.as_ref().unwrap());
///     CachedSequence { k: tokens, v: tokens, keys }
/// });
/// let q = Tensor::randn(0f32, 1.0, (2, 8, 1, 16), &Device::Cpu)?;
/// let y = cached_attention_each(&q, &sequences.collect::<Vec<_>>(), None)?;
/// assert_eq!(y.dims(), [2, 8, 1, 16]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn cached_attention_each(
    q: &Tensor,
    sequences: &[CachedSequence<'_>],
    softmax_scale: Option<f64>,
) -> Result<Tensor> {
    check_float(OP, "q", q)?;
    let heads_and_size = match *q.dims() {
        [rows, heads, 1, head_dim] if rows == sequences.len() => Some((heads, head_dim)),
        _ => None,
    };
    let Some((heads, head_dim)) = heads_and_size else {
        let expected = format!("[{}, heads, 1, head_dim]", sequences.len());
        return Err(shape_error(OP, "q", expected, q.dims()));
    };
    if sequences.is_empty() || q.elem_count() == 0 || !q.device().is_cpu() {
        let rows = sequences.iter().enumerate().map(|(row, sequence)| {
            let CachedSequence { k, v, keys } = *sequence;
            cached_attention(&q.narrow(0, row, 1)?, k, v, keys, softmax_scale)
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
    let softmax_scale = softmax_scale.unwrap_or(1.0 / (head_dim as f64).sqrt()) as f32;
    let mut locks = vec![];
    for sequence in sequences {
        let (k, v) = (sequence.k.tensor(), sequence.v.tensor());
        no_gradient([k, v])?;
        locks.push((k.storage_and_layout().0, v.storage_and_layout().0));
    }
    let mut parts = vec![];
    for (CachedSequence { k, v, keys }, (k_storage, v_storage)) in sequences.iter().zip(&locks) {
        let kv_heads = check_cache((k, v), [1, heads, 1, head_dim], *keys)?;
        let sizes = Sizes {
            kv_heads,
            rows: heads / kv_heads,
            tokens: 1,
            keys: *keys,
            capacity: k.tensor().dims()[2],
            head_dim,
            softmax_scale,
        };
        parts.push((sizes, Part::new(k, k_storage)?, Part::new(v, v_storage)?));
    }
    let kv_heads = parts[0].0.kv_heads;
    if let Some(other) = sequences
        .iter()
        .find(|s| s.k.tensor().dims()[1] != kv_heads)
    {
        let expected = format!("{kv_heads} heads, as in the first cache");
        return Err(shape_error(OP, "k", expected, other.k.tensor().dims()));
    }
    let q_wide = q.to_dtype(DType::F32)?.contiguous()?;
    let q_wide = q_wide.flatten_all()?.to_vec1::<f32>()?;
    let mut y = vec![0f32; q_wide.len()];
    let block = heads / kv_heads * head_dim;
    let run = |start: usize, y: &mut [f32]| {
        for (i, y) in y.chunks_mut(block).enumerate() {
            let head = start / block + i;
            let (sizes, k, v) = &parts[head / kv_heads];
            let q = &q_wide[head * block..(head + 1) * block];
            sizes.head(head % kv_heads, q, k, v, y);
        }
    };
    let keys: usize = sequences.iter().map(|sequence| sequence.keys).sum();
    match 2 * heads * head_dim * keys < FEW {
        true => run(0, &mut y),
        false => {
            par_blocks(&mut y, block, run);
        }
    }
    Ok(tensor_of(storage(y), q.shape())?.to_dtype(q.dtype())?)
}
