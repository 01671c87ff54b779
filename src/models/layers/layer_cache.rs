//! Keys and values of one layer: appended to, and read by attention.

use crate::models::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::ops::{AttentionOptions, CachedSequence, CachedTokens, cached_attention};
use fp8_candle::{Fp8Tensor, Quantizer, ScaleSource};
use fp8_core::{Cast, Contraction, Format, Granularity};

/// dequant_scales of the keys and values of one layer: one for the layer, or one per key-value head.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KvScales {
    /// For the keys, after rotation.
    pub k: Vec<f32>,
    /// For the values.
    pub v: Vec<f32>,
}

impl KvScales {
    /// `k` and `v`: dequant_scales, one number each or one per head.
    pub fn new(k: Vec<f32>, v: Vec<f32>) -> Self {
        Self { k, v }
    }
}

/// Keys or values of one layer, `[batch, kv_heads, capacity, head_dim]`.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) stored: Tensor,
    /// For E4M3 codes, one dequant_scale per head.
    pub(crate) dequant_scales: Option<Vec<f32>>,
}

impl Side {
    fn append(&self, new: &Tensor, len: usize) -> Result<()> {
        // The cache serves inference only: it holds no graph.
        let new = new.detach();
        let new = match &self.dequant_scales {
            None => new.to_dtype(self.stored.dtype())?,
            Some(scales) => codes(&new, scales)?,
        };
        Ok(self.stored.slice_set(&new.contiguous()?, 2, len)?)
    }

    fn part(&self, start: usize, count: usize) -> Result<Self> {
        Ok(Self {
            stored: self.stored.narrow(0, start, count)?,
            dequant_scales: self.dequant_scales.clone(),
        })
    }

    fn tokens(&self) -> CachedTokens<'_> {
        match &self.dequant_scales {
            None => CachedTokens::HighPrecision(&self.stored),
            Some(dequant_scales) => CachedTokens::Fp8 {
                codes: &self.stored,
                format: Format::E4M3,
                dequant_scales,
            },
        }
    }
}

/// Keys and values of one layer.
#[derive(Debug)]
pub(crate) struct LayerCache {
    pub(crate) k: Side,
    pub(crate) v: Side,
}

impl LayerCache {
    /// Writes `k` and `v`, `[batch, kv_heads, tokens, head_dim]`, after the first `len` tokens.
    pub(crate) fn append(&self, k: &Tensor, v: &Tensor, len: usize) -> Result<()> {
        self.k.append(k, len)?;
        self.v.append(v, len)
    }

    /// The part of `count` rows from `start`, sharing memory.
    pub(crate) fn part(&self, start: usize, count: usize) -> Result<Self> {
        Ok(Self {
            k: self.k.part(start, count)?,
            v: self.v.part(start, count)?,
        })
    }

    /// Attention of `q`, the last tokens of `keys`, over all of them.
    pub(crate) fn attention(
        &self,
        q: &Tensor,
        keys: usize,
        options: &AttentionOptions,
    ) -> Result<Tensor> {
        let (k, v) = (self.k.tokens(), self.v.tokens());
        Ok(cached_attention(&q.detach(), k, v, keys, options)?)
    }

    /// Its first `keys` tokens as those of one sequence.
    pub(crate) fn sequence(&self, keys: usize) -> CachedSequence<'_> {
        CachedSequence {
            k: self.k.tokens(),
            v: self.v.tokens(),
            keys,
        }
    }
}

/// E4M3 codes of `x`, `[batch, heads, tokens, head_dim]`, with one dequant_scale per head; beyond the range they saturate.
fn codes(x: &Tensor, dequant_scales: &[f32]) -> Result<Tensor> {
    let cast = |x: &Tensor, dequant_scale: f32| -> Result<Tensor> {
        let source = ScaleSource::Fixed {
            dequant_scale: Tensor::from_slice(&[dequant_scale], 1, x.device())?,
        };
        let quantizer = Quantizer::new(Cast::new(Format::E4M3), Granularity::Tensorwise, source);
        let flat = x.contiguous()?.reshape(((), x.dim(3)?))?;
        let codes = Fp8Tensor::quantize(&flat, &quantizer, Contraction::Cols)?;
        Ok(codes.codes().reshape(x.dims())?)
    };
    match dequant_scales {
        [first, rest @ ..] if rest.iter().any(|scale| scale != first) => {
            let heads = dequant_scales.iter().enumerate();
            let heads = heads.map(|(i, scale)| cast(&x.narrow(1, i, 1)?, *scale));
            Ok(Tensor::cat(&heads.collect::<Result<Vec<_>>>()?, 1)?)
        }
        [first, ..] => cast(x, *first),
        [] => Ok(x.to_dtype(DType::U8)?),
    }
}
