//! Causal attention of new tokens, with caches or without, for batches whose rows have seen different numbers of tokens.

use crate::models::error::Result;
use crate::models::layers::{LayerCache, Rows};
use candle_core::{DType, Tensor};
use fp8_candle::ops::{self, AttentionOptions};

/// What attention needs for a part of a batch.
#[derive(Clone)]
pub(super) struct Call {
    /// Which part.
    pub(super) part: Part,
    /// Cosines and sines of the new tokens.
    pub(super) rope: (Tensor, Tensor),
    /// The dtype to which the operands of products are rounded; None for that of the tensors.
    pub(super) operands: Option<DType>,
}

/// A part of a batch that attention looks at by itself.
#[derive(Clone, Copy)]
pub(super) enum Part {
    /// Rows that have seen the same number of tokens.
    Rows(Rows),
    /// Some tokens of all rows: a document among others that are packed into the same row.
    Tokens { start: usize, count: usize },
}

impl Part {
    /// The dimension of `[batch, tokens, ..]` that parts divide.
    fn dim(self) -> usize {
        match self {
            Self::Rows(_) => 0,
            Self::Tokens { .. } => 1,
        }
    }

    /// Start and length along that dimension.
    fn span(self) -> (usize, usize) {
        match self {
            Self::Rows(Rows { start, count, .. }) | Self::Tokens { start, count } => (start, count),
        }
    }

    /// Tokens in the cache before the new ones.
    pub(super) fn seen(self) -> usize {
        match self {
            Self::Rows(rows) => rows.seen,
            Self::Tokens { .. } => 0,
        }
    }
}

/// Where one layer keeps the keys and values of the tokens before.
#[derive(Clone, Copy)]
pub(super) enum Caches<'a> {
    /// Nowhere: there are no tokens before, or none that count.
    None,
    /// In one cache for the whole batch.
    Shared(&'a LayerCache),
    /// In a cache for each row, for one new token of each.
    Each(&'a [&'a LayerCache], &'a Together),
}

/// Cosines and sines of the one new token of each row, once for each head: `[rows * heads, dim / 2]`.
pub(super) struct Together {
    /// For the heads of queries.
    pub(super) q: (Tensor, Tensor),
    /// For the heads of keys.
    pub(super) k: (Tensor, Tensor),
}

/// The results of `attend` for the part of each call, in one batch. `inputs` are `[batch, tokens, ..]`, and the parts fill them; packed
/// tokens have no cache.
pub(super) fn per_call<const N: usize>(
    inputs: &[Tensor; N],
    calls: &[Call],
    caches: Caches<'_>,
    attend: impl Fn(&[Tensor; N], &Call, Option<&LayerCache>) -> Result<Tensor>,
) -> Result<Tensor> {
    if let [call] = calls {
        let cache = match caches {
            Caches::None => None,
            Caches::Shared(cache) => Some(cache),
            Caches::Each(each, _) => each.first().copied(),
        };
        return attend(inputs, call, cache);
    }
    let dim = calls.first().map_or(0, |call| call.part.dim());
    let lengths: Vec<usize> = calls.iter().map(|call| call.part.span().1).collect();
    let split = inputs
        .iter()
        .map(|x| Ok(ops::split(x, dim, &lengths)?))
        .collect::<Result<Vec<_>>>()?;
    let parts = calls.iter().enumerate().map(|(index, call)| {
        let (start, count) = call.part.span();
        let part = std::array::from_fn(|i| split[i][index].clone());
        match caches {
            Caches::None => attend(&part, call, None),
            Caches::Shared(cache) => attend(&part, call, Some(&cache.part(start, count)?)),
            Caches::Each(each, _) => attend(&part, call, each.get(index).copied()),
        }
    });
    Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, dim)?)
}

/// How the scores of attention are made.
pub(super) struct Scores {
    /// What products of queries and keys are multiplied by.
    pub(super) scale: f64,
    /// Tokens that a query sees; None without a limit.
    pub(super) window: Option<usize>,
    /// As [`Call::operands`].
    pub(super) operands: Option<DType>,
}

impl Scores {
    pub(super) fn options(&self) -> AttentionOptions {
        AttentionOptions::default()
            .with_causal(true)
            .with_softmax_scale(self.scale)
            .with_window(self.window)
            .with_operands(self.operands)
    }

    /// Attention of new tokens, `[batch, heads, tokens, head_dim]`, of rows that have `seen` tokens before; adds keys and values to
    /// the cache. With a cache or without, the results of a token are the same to the bit.
    pub(super) fn attend(
        &self,
        [q, k, v]: [Tensor; 3],
        seen: usize,
        cache: Option<&LayerCache>,
    ) -> Result<Tensor> {
        let Some(cache) = cache else {
            return Ok(ops::attention(&q, &k, &v, self.options())?);
        };
        cache.append(&k, &v, seen)?;
        cache.attention(&q, seen + q.dim(2)?, &self.options())
    }
}
