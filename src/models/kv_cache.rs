//! Keys and values of the tokens seen so far, with room for a fixed number of them.

use super::error::{Error, Result};
use candle_core::{DType, Device, Tensor};
use fp8_candle::ops::{CachedTokens, cached_attention};
use fp8_candle::{Fp8Tensor, Quantizer, ScaleSource};
use fp8_core::{Cast, Contraction, Format, Granularity};

/// dequant_scales of the keys and values of one layer: one number, or one per head of keys.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct KvScales {
    /// Of the keys, after their rotation.
    pub k: Vec<f32>,
    /// Of the values.
    pub v: Vec<f32>,
}

impl KvScales {
    /// `k` and `v`: dequant_scales, one number each or one per head.
    pub fn new(k: Vec<f32>, v: Vec<f32>) -> Self {
        Self { k, v }
    }
}

/// The sizes of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct KvSizes {
    pub(super) batch: usize,
    pub(super) kv_heads: usize,
    pub(super) capacity: usize,
    pub(super) head_dim: usize,
}

/// What a model has seen of a batch of sequences of equal length: keys and values of every layer.
///
/// Memory for [`KvCache::capacity`] tokens is taken when it is made and never grows; more tokens are an error. Made by
/// [`CausalLm::new_cache`](super::CausalLm::new_cache). It holds values of the model's dtype, or E4M3 codes with the scales
/// of the file ([`Llama::new_fp8_cache`](super::Llama::new_fp8_cache)). It is for inference: logits that come from it have no gradient.
#[derive(Debug)]
pub struct KvCache {
    pub(super) layers: Vec<LayerCache>,
    sizes: KvSizes,
    len: usize,
}

impl KvCache {
    /// One entry of `scales` per layer; None for values in `dtype`.
    pub(super) fn new(
        sizes: KvSizes,
        scales: Vec<Option<KvScales>>,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        check_memory(sizes, scales.len(), dtype)?;
        let layers = scales.into_iter().map(|scales| {
            let dtype = if scales.is_some() { DType::U8 } else { dtype };
            let zeros = || {
                let KvSizes {
                    batch,
                    kv_heads,
                    capacity,
                    head_dim,
                } = sizes;
                Tensor::zeros((batch, kv_heads, capacity, head_dim), dtype, device)
            };
            let wide = |scales: Vec<f32>| match *scales.as_slice() {
                [one] => Ok(vec![one; sizes.kv_heads]),
                _ if scales.len() == sizes.kv_heads => Ok(scales),
                _ => Err(Error::CacheMismatch {
                    what: "scales of heads of keys and values:",
                    got: scales.len().to_string(),
                    expected: format!("1 or {}", sizes.kv_heads),
                }),
            };
            let scales = match scales {
                None => None,
                Some(KvScales { k, v }) => Some(KvScales {
                    k: wide(k)?,
                    v: wide(v)?,
                }),
            };
            Ok(LayerCache {
                k: zeros()?,
                v: zeros()?,
                scales,
            })
        });
        Ok(Self {
            layers: layers.collect::<Result<_>>()?,
            sizes,
            len: 0,
        })
    }

    /// Tokens seen.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether no token was seen.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Tokens that there is room for.
    pub fn capacity(&self) -> usize {
        self.sizes.capacity
    }

    /// Sequences in the batch.
    pub fn batch(&self) -> usize {
        self.sizes.batch
    }

    /// Whether keys and values are FP8 codes.
    pub fn is_fp8(&self) -> bool {
        self.layers.iter().any(|layer| layer.scales.is_some())
    }

    /// Bytes of keys and values, filled or not.
    pub fn size_in_bytes(&self) -> usize {
        let bytes = |x: &Tensor| x.elem_count() * x.dtype().size_in_bytes();
        let layers = self.layers.iter();
        layers.map(|layer| bytes(&layer.k) + bytes(&layer.v)).sum()
    }

    /// Forgets all tokens after the first `len`. A longer one changes nothing.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Checks that `tokens` more of `batch` sequences fit.
    pub(super) fn check(&self, batch: usize, tokens: usize, layers: usize) -> Result<()> {
        if self.layers.len() != layers {
            return Err(Error::CacheMismatch {
                what: "a model of layers:",
                got: self.layers.len().to_string(),
                expected: layers.to_string(),
            });
        }
        if self.sizes.batch != batch {
            return Err(Error::CacheMismatch {
                what: "a batch of",
                got: self.sizes.batch.to_string(),
                expected: batch.to_string(),
            });
        }
        if tokens > self.sizes.capacity - self.len {
            return Err(Error::CacheFull {
                len: self.len,
                tokens,
                capacity: self.sizes.capacity,
            });
        }
        Ok(())
    }

    /// Counts tokens that all layers have taken.
    pub(super) fn advance(&mut self, tokens: usize) {
        self.len += tokens;
    }
}

/// Fails where sizes overflow or the memory is not there: an allocation that fails later would end the program.
fn check_memory(sizes: KvSizes, layers: usize, dtype: DType) -> Result<()> {
    let factors = [
        sizes.batch,
        sizes.kv_heads,
        sizes.capacity,
        sizes.head_dim,
        2 * dtype.size_in_bytes(),
        layers,
    ];
    let bytes = factors.into_iter().try_fold(1usize, usize::checked_mul);
    let fits = bytes.is_some_and(|bytes| Vec::<u8>::new().try_reserve_exact(bytes).is_ok());
    match fits {
        true => Ok(()),
        false => Err(Error::CacheMemory {
            batch: sizes.batch,
            capacity: sizes.capacity,
        }),
    }
}

/// Keys and values of one layer, `[batch, kv_heads, capacity, head_dim]`.
#[derive(Debug)]
pub(super) struct LayerCache {
    k: Tensor,
    v: Tensor,
    /// One number per head.
    scales: Option<KvScales>,
}

impl LayerCache {
    /// Writes `k` and `v`, `[batch, kv_heads, tokens, head_dim]`, behind the first `len` tokens.
    pub(super) fn append(&self, k: &Tensor, v: &Tensor, len: usize) -> Result<()> {
        for (stored, new, scales) in [
            (&self.k, k, self.scales.as_ref().map(|scales| &scales.k)),
            (&self.v, v, self.scales.as_ref().map(|scales| &scales.v)),
        ] {
            // Only for inference, as the callers say: what is in the cache has no graph.
            let new = new.detach();
            let new = match scales {
                None => new.to_dtype(stored.dtype())?,
                Some(scales) => codes(&new, scales)?,
            };
            stored.slice_set(&new.contiguous()?, 2, len)?;
        }
        Ok(())
    }

    fn sides(&self) -> [CachedTokens<'_>; 2] {
        match &self.scales {
            None => [
                CachedTokens::HighPrecision(&self.k),
                CachedTokens::HighPrecision(&self.v),
            ],
            Some(scales) => {
                let side = |codes, dequant_scales| CachedTokens::Fp8 {
                    codes,
                    format: Format::E4M3,
                    dequant_scales,
                };
                [side(&self.k, &scales.k), side(&self.v, &scales.v)]
            }
        }
    }

    /// Attention of `q`, the last tokens of `keys`, over all of them.
    pub(super) fn attention(&self, q: &Tensor, keys: usize, softmax_scale: f64) -> Result<Tensor> {
        let [k, v] = self.sides();
        Ok(cached_attention(
            &q.detach(),
            k,
            v,
            keys,
            Some(softmax_scale),
        )?)
    }

    /// The first `len` keys and values as numbers of `dtype`.
    pub(super) fn values(&self, len: usize, dtype: DType) -> Result<(Tensor, Tensor)> {
        let [k, v] = self.sides();
        Ok((k.dequantize(len, dtype)?, v.dequantize(len, dtype)?))
    }

    /// Whether what is read back differs from what was written.
    pub(super) fn is_lossy(&self, dtype: DType) -> bool {
        self.k.dtype() != dtype
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
