//! Attention composed of products and softmax, in candle's graph: the reference, and the form for devices without kernels.

use crate::base::data::attention::Attention;
use crate::base::error::Result;
use crate::device::cpu::elements::compute_dtype;
use crate::ops::{causal_softmax, softmax_last_dim};
use candle_core::{DType, Tensor};

impl Attention {
    /// Takes and gives tensors in the layout of the call; the result is in the dtype in which kernels for `q` compute.
    pub(crate) fn composed(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        if !self.tokens_first {
            return self.in_parts(q, k, v);
        }
        let [q, k, v] = [q.transpose(1, 2)?, k.transpose(1, 2)?, v.transpose(1, 2)?];
        Ok(self.in_parts(&q, &k, &v)?.transpose(1, 2)?.contiguous()?)
    }

    /// Heads first; many causal queries part by part: scores that the mask would hide are not computed, and those of a part
    /// stay in the cache. A backward pass would pay for every part's copy of the keys.
    fn in_parts(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        const PART: usize = 128;
        let tracked = [q, k, v].iter().any(|x| x.track_op());
        if !self.only_causal() || tracked || self.queries <= 2 * PART {
            return self.whole(q, k, v);
        }
        let parts = (0..self.queries).step_by(PART).map(|from| {
            let queries = PART.min(self.queries - from);
            let keys = self.keys - self.queries + from + queries;
            let part = Self {
                queries,
                keys,
                ..self.clone()
            };
            let (k, v) = (k.narrow(2, 0, keys)?, v.narrow(2, 0, keys)?);
            part.whole(&q.narrow(2, from, queries)?, &k, &v)
        });
        Ok(Tensor::cat(&parts.collect::<Result<Vec<_>>>()?, 2)?)
    }

    /// Whether the causal mask is all there is.
    fn only_causal(&self) -> bool {
        let others = self.window.is_some() || self.key_lengths.is_some() || self.dropout.is_some();
        self.causal && !others
    }

    /// Heads first, with candle's products. The queries of one group are rows of one matrix, so keys are not repeated.
    fn whole(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let dtype = q.dtype();
        let round = |x: &Tensor| match self.in_bf16(dtype) {
            true => rounded(x),
            false => Ok(x.clone()),
        };
        let operand = |x: &Tensor| round(&x.to_dtype(compute_dtype(dtype))?.contiguous()?);
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
        let logits = operand(q)?
            .reshape((batch, kv_heads, rows, head_dim))?
            .matmul(&operand(k)?.t()?)?
            .reshape((batch, heads, queries, keys))?;
        let p = self.dropped(&self.softmax(&logits)?)?;
        Ok(round(&p)?
            .reshape((batch, kv_heads, rows, keys))?
            .matmul(&operand(v)?)?
            .reshape((batch, heads, queries, head_dim))?)
    }

    /// Probabilities before dropout, from dot products `[batch, heads, queries, keys]`.
    pub(super) fn softmax(&self, logits: &Tensor) -> Result<Tensor> {
        Ok(if self.window.is_some() || self.key_lengths.is_some() {
            let visible = self.visible_keys()?.to_device(logits.device())?;
            let visible = visible.broadcast_as(logits.shape())?;
            // Finite, so that a query without keys has no NaN on the way to its zeros.
            let hidden = Tensor::full(-1e30f32, (), logits.device())?.to_dtype(logits.dtype())?;
            let hidden = hidden.broadcast_as(logits.shape())?;
            let logits = visible.where_cond(&(logits * self.softmax_scale)?, &hidden)?;
            let p = softmax_last_dim(&logits)?;
            visible.where_cond(&p, &p.zeros_like()?)?
        } else if self.causal {
            causal_softmax(logits, self.softmax_scale)?
        } else {
            softmax_last_dim(&(logits * self.softmax_scale)?)?
        })
    }

    /// `p` after dropout.
    pub(super) fn dropped(&self, p: &Tensor) -> Result<Tensor> {
        match self.factors()? {
            Some(factors) => {
                let factors = factors.to_dtype(p.dtype())?.to_device(p.device())?;
                Ok((p * factors)?)
            }
            None => Ok(p.clone()),
        }
    }

    /// 1 where a query sees a key, `[batch, 1, queries, keys]`.
    pub(super) fn visible_keys(&self) -> Result<Tensor> {
        let mut visible = vec![0u8; self.batch * self.queries * self.keys];
        for (row, visible) in visible.chunks_mut(self.keys).enumerate() {
            visible[self.visible(row / self.queries, row % self.queries)].fill(1);
        }
        let shape = (self.batch, 1, self.queries, self.keys);
        Ok(Tensor::from_vec(visible, shape, &candle_core::Device::Cpu)?)
    }

    /// The factors of dropout, `[batch, heads, queries, keys]`.
    fn factors(&self) -> Result<Option<Tensor>> {
        let Some(dropout) = self.dropout else {
            return Ok(None);
        };
        let shape = (self.batch, self.heads, self.queries, self.keys);
        let mut factors = vec![0f32; self.batch * self.heads * self.queries * self.keys];
        for (row, factors) in factors.chunks_mut(self.keys).enumerate() {
            dropout.factors(row / self.queries, row % self.queries, 0, factors);
        }
        let factors = Tensor::from_vec(factors, shape, &candle_core::Device::Cpu)?;
        Ok(Some(factors))
    }
}

/// The values of `x` rounded to bf16; the gradient passes unchanged.
pub(super) fn rounded(x: &Tensor) -> Result<Tensor> {
    let plain = x.detach();
    let rounded = plain.to_dtype(DType::BF16)?.to_dtype(x.dtype())?;
    if !x.track_op() {
        return Ok(rounded);
    }
    // The difference of two neighbours, and so the sum, is exact.
    Ok((x + (rounded - plain)?)?)
}
