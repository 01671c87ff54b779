//! Scaled dot-product attention.

mod composed;
mod composed_fp8;
mod fp8;
mod operands;
mod options;
#[cfg(test)]
mod tests;

pub use options::{AttentionDropout, AttentionOptions};

use super::gradients;
use crate::base::data::attention::Attention;
use crate::base::data::attention_products::{BackwardOperands, Operand};
use crate::base::data::storage::tensor_of;
use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use crate::cast::kept::KeptTensor;
use crate::device::{FusedAttention, fused_attention};
use crate::graph::{Ready, attach};
use candle_core::{DType, Tensor};
use operands::{CodeRows, Saved, code_rows};
use options::OP;

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
/// On the CPU and on CUDA, f32, bf16 and f16 run in kernels that never store the `[tq, tk]` probabilities. Sums and softmax are in
/// f32; no sum depends on scheduling or the number of threads. On the CPU a query's result has the same bits whatever other queries
/// there are, and whatever keys it does not see, as long as they are finite:
/// [`cached_attention`](super::cached_attention) gives the same, token by token.
/// - CPU: the products of f32 and f16 tensors are in f32; those of bf16, and of any dtype with
///   [`AttentionOptions::operands`], have operands rounded to bf16 and run on the bf16 units if there are any. The backward pass
///   keeps one f32 per query. Inputs are read in place if the last dimension is contiguous: transposed views and parts of a
///   joint projection are not copied.
/// - CUDA: `d` at most 128 and a multiple of 8, without window, lengths or dropout. Products run on tensor cores (f32 as
///   three tf32 products); with 16-bit inputs the probabilities are rounded to their dtype before the second product. The
///   backward pass keeps the result and one f32 per query. Read in place if, besides, rows start at multiples of 16 bytes.
///   With [`AttentionProducts`](super::AttentionProducts) there are kernels for chips of compute capability 9.0 (Hopper), if scores and
///   both products of the backward pass are FP8.
///
/// Elsewhere the op is composed of products and softmax, which compute 16-bit inputs in f32 and keep the probabilities for
/// the backward pass; with operands of bf16, gradients are not rounded before their products.
///
/// # Shapes
/// `q` `[b, h, tq, d]`, `k` and `v` `[b, h_kv, tk, d]`, `h` a multiple of `h_kv`; `tk >= tq` if causal. Result
/// `[b, h, tq, d]`, contiguous.
///
/// # Errors
/// If shapes, dtypes or devices do not fit each other or the options, or the dtype is not f32, bf16, f16 or f64.
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
    Attention::new([q, k, v], &options, false)?.apply(q, k, v)
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
    Attention::new([q, k, v], &options, true)?.apply(q, k, v)
}

impl Attention {
    fn apply(self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let _scope = enter(Kind::Attention);
        if q.elem_count() == 0 {
            return Ok(q.clone());
        }
        if self.products.any() {
            let keeps = [q, k, v].into_iter().any(Tensor::track_op);
            let (storage, saved) =
                self.forward_fp8([q, k, v].map(Tensor::detach).each_ref(), q.dtype(), keeps)?;
            let result = Ready::new(storage, q.shape())?;
            return attach(OP, [q, k, v], result, move |qkv, _, grad| {
                self.backward(qkv, &saved, grad, qkv.map(Tensor::track_op))
            });
        }
        let Some(kernels) = self.kernels(q)? else {
            return Ok(self.composed(q, k, v)?.to_dtype(q.dtype())?);
        };
        let (storage, lse) = kernels.forward(&self, [q, k, v], q.dtype())?;
        let result = Ready::new(storage, q.shape())?;
        attach(OP, [q, k, v], result, move |qkv, y, grad| {
            let _scope = enter(Kind::Attention);
            let wanted = qkv.map(Tensor::track_op);
            kernels.backward(&self, qkv, (Some(y), &lse), grad, wanted)
        })
    }

    /// The kernels for this call, if there are any.
    fn kernels(&self, q: &Tensor) -> Result<Option<&'static dyn FusedAttention>> {
        if q.device().is_cpu() {
            crate::base::simd::check()?;
        }
        match fused_attention(q.device()) {
            Some(kernels) if kernels.supports(self, q.dtype(), q.device())? => Ok(Some(kernels)),
            _ => Ok(None),
        }
    }

    /// Whether bf16 copies of q, k and v, which the kernels read in half the bytes, give the same bits as these tensors.
    pub(crate) fn reads_bf16_copies(&self, q: &Tensor) -> Result<bool> {
        let narrows = q.device().is_cpu() && self.in_bf16(q.dtype());
        Ok(narrows && q.dtype() != DType::BF16 && self.kernels(q)?.is_some())
    }

    /// The result in `out_dtype` (that of q, or f32), contiguous, and what [`Attention::backward`] needs besides q, k and v, if it
    /// `keeps` that. All are outside any graph.
    ///
    /// With operands of bf16, bf16 copies of q, k and v give the same bits as f32 values, in either pass.
    pub(crate) fn forward(
        &self,
        qkv: [&Tensor; 3],
        out_dtype: DType,
        keeps: bool,
    ) -> Result<(Tensor, Saved)> {
        let _scope = enter(Kind::Attention);
        let [q, k, v] = &qkv.map(Tensor::detach);
        let mut saved = Saved::default();
        if q.elem_count() == 0 {
            return Ok((q.to_dtype(out_dtype)?, saved));
        }
        if self.products.any() {
            let (storage, saved) = self.forward_fp8([q, k, v], out_dtype, keeps)?;
            return Ok((tensor_of(storage, q.shape())?, saved));
        }
        let Some(kernels) = self.kernels(q)? else {
            let y = self.composed(q, k, v)?.to_dtype(out_dtype)?;
            return Ok((y.contiguous()?, saved));
        };
        let (storage, lse) = kernels.forward(self, [q, k, v], out_dtype)?;
        let y = tensor_of(storage, q.shape())?;
        saved.lse = Some(lse);
        saved.result = kernels.needs_result().then(|| y.clone());
        Ok((y, saved))
    }

    /// [`Attention::backward`] at what a node has kept of q, k and v. Kernels read codes where the values, rounded to the dtype of q, are
    /// those that they compute with.
    pub(crate) fn backward_of_kept(
        &self,
        kept: &[KeptTensor; 3],
        saved: &Saved,
        grad: &Tensor,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let (dtype, grad_dtype) = (kept[0].dtype(), grad.dtype());
        let reads_codes = match dtype {
            DType::BF16 => self.in_bf16(dtype),
            dtype => dtype == DType::F32 && !self.in_bf16(dtype),
        };
        if let (true, Some(lse)) = (reads_codes && kept[0].device().is_cpu(), &saved.lse)
            && let [Some(q), Some(k), Some(v)] = code_rows(kept)?
            && let Some(kernels) = fused_attention(kept[0].device())
            && kernels.supports(self, dtype, kept[0].device())?
        {
            let _scope = enter(Kind::Attention);
            let ([q, k, v], grad) = ([&q, &k, &v].map(CodeRows::operand), Operand::Values(grad));
            let operands = BackwardOperands {
                scores: [q, k],
                grad_probabilities: [grad, v],
                grad_inputs: [q, k, grad],
            };
            return kernels.backward_fp8(self, operands, lse, [dtype, grad_dtype], wanted);
        }
        let [q, k, v] = kept.each_ref().map(KeptTensor::get);
        let qkv = [q?, k?, v?];
        self.backward(qkv.each_ref(), saved, grad, wanted)
    }

    /// The gradients of q, k and v that are `wanted`, in the dtype of `grad`, the result's.
    pub(crate) fn backward(
        &self,
        qkv: [&Tensor; 3],
        saved: &Saved,
        grad: &Tensor,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let _scope = enter(Kind::Attention);
        let [q, k, v] = &qkv.map(Tensor::detach);
        let grad = &grad.detach();
        if saved.operands.is_some() {
            return self.saved_gradients(saved, grad, wanted);
        }
        if let (Some(kernels), Some(lse)) = (self.kernels(q)?, &saved.lse) {
            // Kernels that read the result need that of these q, k and v.
            if self.normalizes && kernels.needs_result() {
                let (y, lse) = kernels.forward(self, [q, k, v], q.dtype())?;
                let y = tensor_of(y, q.shape())?;
                return kernels.backward(self, [q, k, v], (Some(&y), &lse), grad, wanted);
            }
            let results = (saved.result.as_ref(), lse);
            return kernels.backward(self, [q, k, v], results, grad, wanted);
        }
        let mut own = self.clone();
        if self.in_bf16(q.dtype()) {
            // Gradients are computed of wide copies, whose operands are rounded as those of the forward pass.
            own.operands = Some(DType::BF16);
        }
        let found = match q.elem_count() {
            0 => [q.zeros_like()?, k.zeros_like()?, v.zeros_like()?],
            _ => gradients([q, k, v], grad, |[q, k, v]| own.composed(q, k, v))?,
        };
        let mut grads = [None, None, None];
        for ((to, found), wanted) in grads.iter_mut().zip(found).zip(wanted) {
            if wanted {
                *to = Some(found.to_dtype(grad.dtype())?);
            }
        }
        Ok(grads)
    }
}
