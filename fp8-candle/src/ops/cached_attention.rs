//! Attention of a few new tokens over a cache of keys and values, which may be FP8 codes.

use super::attention::{AttentionOptions, attention};

use crate::base::check::check_float;
use crate::base::data::storage::tensor_of;
use crate::base::error::{Error, Result, dtype_error, shape_error};
use crate::base::math::{Real, max, sum2};
use crate::base::profile::{Kind, enter};
use crate::base::simd::simd;
use crate::device::cpu::elements::{par_blocks, storage};
use candle_core::{CpuStorage, DType, Storage, Tensor};
use fp8_core::Format;

const OP: &str = "cached_attention";

/// The keys or the values of a cache: `[batch, kv_heads, capacity, head_dim]`, contiguous, of which a call reads the first
/// tokens.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum CachedTokens<'a> {
    /// Values in f32, bf16 or f16.
    HighPrecision(&'a Tensor),
    /// FP8 codes, as U8.
    Fp8 {
        /// `[batch, kv_heads, capacity, head_dim]`.
        codes: &'a Tensor,
        /// The format of the codes.
        format: Format,
        /// The factor on decoded codes, one number per head of keys.
        dequant_scales: &'a [f32],
    },
}

impl<'a> CachedTokens<'a> {
    fn tensor(&self) -> &'a Tensor {
        match self {
            Self::HighPrecision(tensor) => tensor,
            Self::Fp8 { codes, .. } => codes,
        }
    }

    /// The values of the first `keys` tokens in `dtype`, `[batch, kv_heads, keys, head_dim]`: decoded in f32, then rounded.
    ///
    /// # Errors
    /// If there are fewer tokens, or candle fails to copy.
    pub fn dequantize(&self, keys: usize, dtype: DType) -> Result<Tensor> {
        let part = self.tensor().narrow(2, 0, keys)?;
        match self {
            Self::HighPrecision(_) => Ok(part.to_dtype(dtype)?),
            Self::Fp8 {
                format,
                dequant_scales,
                ..
            } => {
                let device = part.device().clone();
                let codes = part.to_device(&candle_core::Device::Cpu)?;
                let codes = codes.flatten_all()?.to_vec1::<u8>()?;
                let mut values = vec![0f32; codes.len()];
                fp8_core::decode(*format, &codes, 1.0, &mut values);
                let values = Tensor::from_vec(values, part.dims(), &device)?;
                let heads = dequant_scales.len();
                let scales = Tensor::from_slice(dequant_scales, (1, heads, 1, 1), &device)?;
                Ok(values.broadcast_mul(&scales)?.to_dtype(dtype)?)
            }
        }
    }
}

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
    if [q, k.tensor(), v.tensor()].iter().any(|x| x.track_op()) {
        return Err(Error::Candle(candle_core::Error::msg(
            "cached_attention has no backward pass, and a gradient is tracked: use attention",
        )));
    }
    let &[batch, heads, tokens, head_dim] = q.dims() else {
        return Err(shape_error(
            OP,
            "q",
            "[batch, heads, tokens, head_dim]",
            q.dims(),
        ));
    };
    let kv_heads = match *k.tensor().dims() {
        [b, h, capacity, d]
            if b == batch
                && d == head_dim
                && h > 0
                && heads % h == 0
                && (tokens..=capacity).contains(&keys) =>
        {
            h
        }
        _ => {
            let expected = format!(
                "[{batch}, a divisor of {heads}, room for {keys} tokens of which {tokens} are new, {head_dim}]"
            );
            return Err(shape_error(OP, "k", expected, k.tensor().dims()));
        }
    };
    if v.tensor().dims() != k.tensor().dims() {
        let expected = format!("{:?}, as k", k.tensor().dims());
        return Err(shape_error(OP, "v", expected, v.tensor().dims()));
    }
    for (what, part) in [("k", &k), ("v", &v)] {
        if let CachedTokens::Fp8 { dequant_scales, .. } = part
            && dequant_scales.len() != kv_heads
        {
            let expected = format!(
                "{kv_heads} scales, one per head, got {}",
                dequant_scales.len()
            );
            return Err(shape_error(OP, what, expected, part.tensor().dims()));
        }
    }
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
    // Waking another thread takes about as long as this many multiplications.
    const FEW: usize = 200_000;
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

/// The values of one side in host memory, from `start` on.
struct Part<'a> {
    storage: &'a CpuStorage,
    start: usize,
    fp8: Option<(Format, &'a [f32])>,
}

impl<'a> Part<'a> {
    fn new(tokens: &CachedTokens<'a>, storage: &'a Storage) -> Result<Self> {
        let (tensor, fp8) = match *tokens {
            CachedTokens::HighPrecision(tensor) => (tensor, None),
            CachedTokens::Fp8 {
                codes,
                format,
                dequant_scales,
            } => (codes, Some((format, dequant_scales))),
        };
        let storage = match (storage, &fp8) {
            (
                Storage::Cpu(
                    storage @ (CpuStorage::F32(_) | CpuStorage::BF16(_) | CpuStorage::F16(_)),
                ),
                None,
            )
            | (Storage::Cpu(storage @ CpuStorage::U8(_)), Some(_)) => storage,
            _ => {
                return Err(dtype_error(
                    OP,
                    "the cache",
                    "f32, bf16 or f16, or u8 for codes, on the device of q",
                    tensor.dtype(),
                ));
            }
        };
        match tensor.layout().contiguous_offsets() {
            Some((start, _)) => Ok(Self {
                storage,
                start,
                fp8,
            }),
            None => Err(shape_error(
                OP,
                "the cache",
                "contiguous values",
                tensor.dims(),
            )),
        }
    }

    /// The values from `from` on, `buffer.len()` of them, in `buffer` or in place.
    fn load<'b>(&'b self, kv_head: usize, from: usize, buffer: &'b mut [f32]) -> &'b [f32] {
        let range = self.start + from..self.start + from + buffer.len();
        match (self.storage, self.fp8) {
            (CpuStorage::F32(values), _) => return &values[range],
            (CpuStorage::BF16(values), _) => fp8_core::widen(&values[range], buffer),
            (CpuStorage::F16(values), _) => fp8_core::widen(&values[range], buffer),
            (CpuStorage::U8(codes), Some((format, dequant_scales))) => {
                fp8_core::decode(format, &codes[range], dequant_scales[kv_head], buffer);
            }
            _ => unreachable!("the dtype was looked at before"),
        }
        buffer
    }
}

/// Tokens of the cache that are decoded at a time: they fit into the first-level cache.
const CHUNK: usize = 64;

struct Sizes {
    kv_heads: usize,
    /// Queries that read one head of keys.
    rows: usize,
    tokens: usize,
    keys: usize,
    capacity: usize,
    head_dim: usize,
    softmax_scale: f32,
}

impl Sizes {
    /// The rows of `q` that read the keys of one batch entry and head.
    fn head(&self, pair: usize, q: &[f32], k: &Part<'_>, v: &Part<'_>, y: &mut [f32]) {
        let d = self.head_dim;
        let (first, kv_head) = (pair * self.capacity * d, pair % self.kv_heads);
        let mut buffer = vec![0f32; CHUNK.min(self.keys) * d];
        let mut scores = vec![0f32; self.rows * self.keys];
        let visible = |row: usize| self.keys - self.tokens + row % self.tokens + 1;
        for from in (0..self.keys).step_by(CHUNK) {
            let count = CHUNK.min(self.keys - from);
            let keys = k.load(kv_head, first + from * d, &mut buffer[..count * d]);
            simd(
                #[inline(always)]
                || {
                    for (q, scores) in q.chunks_exact(d).zip(scores.chunks_exact_mut(self.keys)) {
                        let scores = scores[from..from + count].iter_mut();
                        for (score, key) in scores.zip(keys.chunks_exact(d)) {
                            *score = sum2(q, key, |a, b| a * b) * self.softmax_scale;
                        }
                    }
                },
            );
        }
        for (row, scores) in scores.chunks_exact_mut(self.keys).enumerate() {
            let (seen, hidden) = scores.split_at_mut(visible(row));
            hidden.fill(0.0);
            softmax(seen);
        }
        for from in (0..self.keys).step_by(CHUNK) {
            let count = CHUNK.min(self.keys - from);
            let values = v.load(kv_head, first + from * d, &mut buffer[..count * d]);
            simd(
                #[inline(always)]
                || {
                    for (row, y) in y.chunks_exact_mut(d).enumerate() {
                        // A hidden value may be NaN, which a weight of 0 would not remove.
                        let end = visible(row).clamp(from, from + count);
                        let weights = &scores[row * self.keys + from..row * self.keys + end];
                        for (weight, value) in weights.iter().zip(values.chunks_exact(d)) {
                            for (y, value) in y.iter_mut().zip(value) {
                                *y = weight.mul_add(*value, *y);
                            }
                        }
                    }
                },
            );
        }
    }
}

fn softmax(x: &mut [f32]) {
    simd(
        #[inline(always)]
        || {
            let top = max(x, |x| x);
            let mut total = 0f32;
            for x in x.iter_mut() {
                *x = Real::exp(*x - top);
            }
            for x in x.iter() {
                total += *x;
            }
            for x in x.iter_mut() {
                *x /= total;
            }
        },
    );
}
