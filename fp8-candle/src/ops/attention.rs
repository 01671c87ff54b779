//! Scaled dot-product attention.

use super::data::compute_dtype;
use super::{causal_softmax, check_float, check_like, shape_error, softmax_last_dim};
use crate::data::attention::Attention;
use crate::device::{FusedAttention, fused_attention};
use crate::error::Result;
use crate::ready::Ready;
use candle_core::{CpuStorage, CudaStorage, CustomOp3, Layout, Shape, Tensor};

const OP: &str = "attention";

/// Options of [`attention`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct AttentionOptions {
    /// Whether to hide the keys after each query: query i sees keys up to `i + tk - tq`, so the last query sees every key,
    /// and `tk > tq` means that `tk - tq` cached keys come before the queries.
    pub causal: bool,
    /// The factor on the dot products before the softmax; `1 / sqrt(d)` by default.
    pub softmax_scale: Option<f64>,
}

impl AttentionOptions {
    /// The same options with or without a causal mask.
    pub fn with_causal(self, causal: bool) -> Self {
        Self { causal, ..self }
    }

    /// The same options with another factor before the softmax; `None` for `1 / sqrt(d)`.
    pub fn with_softmax_scale(self, softmax_scale: impl Into<Option<f64>>) -> Self {
        Self {
            softmax_scale: softmax_scale.into(),
            ..self
        }
    }
}

/// Attention of every query over the keys of its head.
///
/// ```text
/// p[i, j] = softmax_j(softmax_scale * q_i . k_j)    over the keys that query i sees
/// y_i     = sum_j p[i, j] v_j
/// ```
///
/// Differentiable in `q`, `k` and `v`. If there are fewer heads of keys than of queries, `h / h_kv` neighbouring heads of
/// queries share one head of keys and values.
///
/// On CUDA, f32, bf16 and f16 with `d` at most 128 and a multiple of 8 run in kernels that never store the `[tq, tk]`
/// probabilities. Products run on tensor cores (f32 as three tf32 products), sums and softmax in f32; with 16-bit inputs the
/// probabilities are rounded to their dtype before the second product. The backward pass keeps the result and one f32 per
/// query, and no sum depends on scheduling. Strided inputs are read in place if the last dimension is contiguous and rows
/// start at multiples of 16 bytes, so the transposed view of `[b, t, h, d]` and parts of a joint projection are not copied.
/// Elsewhere the op is composed of products and softmax, which compute 16-bit inputs in f32 and keep the probabilities for
/// the backward pass.
///
/// # Shapes
/// `q` `[b, h, tq, d]`, `k` and `v` `[b, h_kv, tk, d]`, `h` a multiple of `h_kv`; `tk >= tq` if causal. Result
/// `[b, h, tq, d]`, contiguous.
///
/// # Errors
/// If shapes, dtypes or devices do not fit each other, or the dtype is not f32, bf16, f16 or f64.
///
/// # Source
/// Vaswani et al., "Attention Is All You Need", arXiv:1706.03762; Dao, "FlashAttention-2", arXiv:2307.08691; grouped heads:
/// Ainslie et al., "GQA", arXiv:2305.13245.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::ops::{AttentionOptions, attention};
///
/// let q = Tensor::randn(0f32, 1.0, (1, 8, 5, 16), &Device::Cpu)?;
/// let k = Tensor::randn(0f32, 1.0, (1, 2, 5, 16), &Device::Cpu)?; // 4 heads of q share one
/// let causal = AttentionOptions::default().with_causal(true);
/// let y = attention(&q, &k, &k, causal)?;
/// assert_eq!(y.dims(), [1, 8, 5, 16]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn attention(q: &Tensor, k: &Tensor, v: &Tensor, options: AttentionOptions) -> Result<Tensor> {
    Attention::new([q, k, v], options, false)?.apply(q, k, v)
}

/// [`attention`] for tensors with tokens before heads, as projections give them, without transposed copies in either pass.
///
/// # Shapes
/// `q` `[b, tq, h, d]`, `k` and `v` `[b, tk, h_kv, d]`, result `[b, tq, h, d]`, contiguous.
///
/// # Errors
/// As [`attention`].
pub fn attention_tokens_first(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    options: AttentionOptions,
) -> Result<Tensor> {
    Attention::new([q, k, v], options, true)?.apply(q, k, v)
}

impl Attention {
    fn new([q, k, v]: [&Tensor; 3], options: AttentionOptions, tokens_first: bool) -> Result<Self> {
        check_float(OP, "q", q)?;
        check_like(OP, "k", k, q)?;
        check_like(OP, "v", v, q)?;
        // Batch, heads, tokens, features.
        let sizes = |what: &'static str, x: &Tensor| match *x.dims() {
            [b, t, h, d] if tokens_first => Ok([b, h, t, d]),
            [b, h, t, d] => Ok([b, h, t, d]),
            _ => Err(shape_error(OP, what, "four dimensions", x)),
        };
        let [batch, heads, queries, head_dim] = sizes("q", q)?;
        let [k_batch, kv_heads, keys, k_dim] = sizes("k", k)?;
        if (k_batch, k_dim) != (batch, head_dim) || kv_heads == 0 || heads % kv_heads != 0 {
            let expected = format!(
                "batch {batch}, heads that divide {heads}, {head_dim} features, as q {:?} has",
                q.dims()
            );
            return Err(shape_error(OP, "k", expected, k));
        }
        if v.dims() != k.dims() {
            return Err(shape_error(OP, "v", format!("{:?}, as k", k.dims()), v));
        }
        if keys == 0 || options.causal && keys < queries {
            let least = if options.causal { queries.max(1) } else { 1 };
            return Err(shape_error(OP, "k", format!("at least {least} keys"), k));
        }
        Ok(Self {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            causal: options.causal,
            softmax_scale: options
                .softmax_scale
                .unwrap_or(1.0 / (head_dim as f64).sqrt()),
            tokens_first,
        })
    }

    fn apply(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        if q.elem_count() == 0 {
            return Ok(q.clone());
        }
        match fused_attention(q.device()) {
            Some(kernels) if kernels.supports(&self, q.dtype()) => {
                let (storage, lse) = kernels.forward(&self, [q, k, v])?;
                let node = Node {
                    attention: self,
                    kernels,
                    lse,
                    ready: Ready::new(storage, q.shape())?,
                };
                Ok(q.apply_op3(k, v, node)?)
            }
            _ if self.tokens_first => {
                let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
                Ok(self.in_parts(&q, &k, &v)?.transpose(1, 2)?.contiguous()?)
            }
            _ => self.in_parts(q, k, v),
        }
    }

    /// [`Attention::composed`], many causal queries part by part: scores that the mask would hide are not computed, and those of
    /// a part stay in the cache. A backward pass would pay for every part's copy of the keys.
    fn in_parts(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        const PART: usize = 128;
        let tracked = [q, k, v].iter().any(|x| x.track_op());
        if !self.causal || tracked || self.queries <= 2 * PART {
            return self.composed(q, k, v);
        }
        let parts = (0..self.queries).step_by(PART).map(|from| {
            let queries = PART.min(self.queries - from);
            let keys = self.keys - self.queries + from + queries;
            let part = Self {
                queries,
                keys,
                ..self
            };
            let (k, v) = (k.narrow(2, 0, keys)?, v.narrow(2, 0, keys)?);
            part.composed(&q.narrow(2, from, queries)?, &k, &v)
        });
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 2)?)
    }

    /// Heads first, with candle's products. The queries of one group are rows of one matrix, so keys are not repeated.
    fn composed(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let dtype = q.dtype();
        let wide = |x: &Tensor| x.to_dtype(compute_dtype(dtype))?.contiguous();
        let Self {
            batch,
            heads,
            kv_heads,
            queries,
            keys,
            head_dim,
            ..
        } = *self;
        let rows = heads / kv_heads * queries;
        let logits = wide(q)?
            .reshape((batch, kv_heads, rows, head_dim))?
            .matmul(&wide(k)?.t()?)?;
        let p = if self.causal {
            let logits = logits.reshape((batch, heads, queries, keys))?;
            causal_softmax(&logits, self.softmax_scale)?
        } else {
            softmax_last_dim(&(logits * self.softmax_scale)?)?
        };
        Ok(p.reshape((batch, kv_heads, rows, keys))?
            .matmul(&wide(v)?)?
            .reshape((batch, heads, queries, head_dim))?
            .to_dtype(dtype)?)
    }
}

/// Attention by kernels.
struct Node {
    attention: Attention,
    kernels: &'static dyn FusedAttention,
    /// Log-sum-exps, which the forward pass keeps for the backward pass.
    lse: Tensor,
    ready: Ready,
}

impl CustomOp3 for Node {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(
        &self,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        self.ready.take_cpu()
    }

    fn cuda_fwd(
        &self,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> candle_core::Result<(CudaStorage, Shape)> {
        self.ready.take_cuda()
    }

    fn bwd(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        y: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let wanted = [q, k, v].map(Tensor::track_op);
        let results = (y, &self.lse);
        let [dq, dk, dv] =
            self.kernels
                .backward(&self.attention, [q, k, v], results, grad, wanted)?;
        Ok((dq, dk, dv))
    }
}
