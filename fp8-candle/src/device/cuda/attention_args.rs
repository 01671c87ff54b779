//! Arguments that all attention kernels get.

use super::kernels::Arg;
use crate::base::data::attention::Attention;
use crate::base::error::Result;
use candle_core::Tensor;

/// `x` if kernels can read it in place, 16 bytes at a time; otherwise a copy.
pub(super) fn readable(x: &Tensor) -> Result<Tensor> {
    let aligned = |elements: usize| (elements * x.dtype().size_in_bytes()).is_multiple_of(16);
    let (outer, last) = x.stride().split_at(x.rank() - 1);
    let x = x.detach();
    if last == [1] && aligned(x.layout().start_offset()) && outer.iter().all(|&s| aligned(s)) {
        Ok(x)
    } else {
        Ok(x.force_contiguous()?)
    }
}

/// Strides of batch, head and row.
pub(super) fn strides(attention: &Attention, strides: &[usize]) -> [Arg; 3] {
    let (head, row) = if attention.tokens_first {
        (2, 1)
    } else {
        (1, 2)
    };
    [strides[0], strides[head], strides[row]].map(|stride| Arg::Len(stride as u64))
}

pub(super) fn sizes(attention: &Attention) -> [Arg; 6] {
    let a = attention;
    let group = a.heads / a.kv_heads;
    [
        a.heads,
        group,
        a.queries,
        a.keys,
        a.head_dim,
        usize::from(a.causal),
    ]
    .map(int)
}

/// `FusedAttention::supports` has checked the sizes.
pub(super) fn int(n: usize) -> Arg {
    Arg::Int(n as u32)
}

/// The factor of a softmax in powers of 2.
pub(super) fn softmax_scale_log2(attention: &Attention) -> f32 {
    (attention.softmax_scale * std::f64::consts::LOG2_E) as f32
}

/// Length of a row of statistics: rows begin at multiples of 16 bytes.
pub(super) fn statistics_row(attention: &Attention) -> usize {
    attention.queries.next_multiple_of(4)
}

/// A call with grouped heads and a causal mask.
#[cfg(test)]
pub(super) fn example(tokens: usize, head_dim: usize) -> Attention {
    Attention {
        batch: 2,
        heads: 4,
        kv_heads: 2,
        queries: tokens,
        keys: tokens,
        head_dim,
        causal: true,
        window: None,
        key_lengths: None,
        softmax_scale: 0.125,
        dropout: None,
        operands: None,
        products: crate::base::data::attention_products::AttentionProducts::none(),
        tokens_first: false,
        normalizes: false,
    }
}
