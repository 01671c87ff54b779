//! Attention with products in FP8, composed of casts, products and softmax: where a device has no kernels for it, and for f64.

use super::composed::rounded;
use super::operands::{KeptOperands, Part, cast_rows};
use crate::base::data::attention::Attention;
use crate::base::error::{Result, internal};
use crate::device::cpu::elements::compute_dtype;
use candle_core::{D, DType, Tensor};
use fp8_core::Format;

/// The values of the codes of `x`, if its product is FP8.
fn recast(x: &Tensor, format: Format, fp8: bool) -> Result<Tensor> {
    match fp8 {
        true => cast_rows(x, format)?.dequantize(x.dtype()),
        false => Ok(x.clone()),
    }
}

impl Attention {
    /// An operand with heads first, in the dtype in which tensors of `dtype` are computed.
    fn heads_first(&self, part: &Part, fp8: bool, dtype: DType) -> Result<Tensor> {
        let wide = compute_dtype(dtype);
        let x = match (fp8, &part.codes, &part.values) {
            (true, Some(codes), _) => codes.dequantize(wide)?,
            (false, _, Some(values)) => self.in_operands(&values.to_dtype(wide)?, dtype)?,
            _ => internal!("an operand of attention was not kept"),
        };
        match self.tokens_first {
            true => Ok(x.transpose(1, 2)?.contiguous()?),
            false => Ok(x.contiguous()?),
        }
    }

    /// `x` as an operand of products that are not FP8.
    fn in_operands(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        match self.in_bf16(dtype) {
            true => rounded(x),
            false => Ok(x.clone()),
        }
    }

    /// The queries of one group of heads as rows of one matrix.
    fn grouped(&self, x: &Tensor) -> Result<Tensor> {
        let rows = self.heads / self.kv_heads * self.queries;
        let last = x.dim(D::Minus1)?;
        Ok(x.reshape((self.batch, self.kv_heads, rows, last))?)
    }

    /// `a b^T` for each head of queries `[.., tq, d]` and its head of keys `[.., tk, d]`.
    fn dot_products(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        let shape = (self.batch, self.heads, self.queries, self.keys);
        Ok(self.grouped(a)?.matmul(&b.t()?)?.reshape(shape)?)
    }

    /// `weights b` for each head of queries, and its head of keys or values.
    fn weighted_sums(&self, weights: &Tensor, b: &Tensor) -> Result<Tensor> {
        let shape = (self.batch, self.heads, self.queries, self.head_dim);
        Ok(self.grouped(weights)?.matmul(b)?.reshape(shape)?)
    }

    /// The result in the layout of the call.
    pub(super) fn composed_fp8(&self, [q, k, v]: [&Part; 3], dtype: DType) -> Result<Tensor> {
        let products = self.products;
        let operand = |part, fp8| self.heads_first(part, fp8, dtype);
        let q = operand(q, products.scores)?;
        let k = operand(k, products.scores)?;
        let v = operand(v, products.values)?;
        let p = self.dropped(&self.softmax(&self.dot_products(&q, &k)?)?)?;
        let p = match products.values {
            true => recast(&p, products.format, true)?,
            false => self.in_operands(&p, dtype)?,
        };
        self.in_layout(&self.weighted_sums(&p, &v)?)
    }

    /// Those gradients of q, k and v that are wanted.
    pub(super) fn composed_gradients_fp8(
        &self,
        kept: &KeptOperands,
        dy: &Part,
        out_dtype: DType,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let products = self.products;
        let operand = |part, fp8| self.heads_first(part, fp8, kept.dtype);
        let [q, k, v] = &kept.qkv;
        let (fp8, grad_fp8) = (products.grad_inputs, products.grad_probabilities);
        let scores =
            self.dot_products(&operand(q, products.scores)?, &operand(k, products.scores)?)?;
        let p = self.softmax(&scores)?;
        let dp =
            self.dropped(&self.dot_products(&operand(dy, grad_fp8)?, &operand(v, grad_fp8)?)?)?;
        // Zero times NaN is not 0.
        let visible = self.visible_keys()?.to_device(dp.device())?;
        let visible = visible.broadcast_as(dp.shape())?;
        let dp = visible.where_cond(&dp, &dp.zeros_like()?)?;
        let ds = (&p * dp.broadcast_sub(&(&p * &dp)?.sum_keepdim(D::Minus1)?)?)?;
        let cast = |x: &Tensor, format| match fp8 {
            true => recast(x, format, true),
            false => self.in_operands(x, kept.dtype),
        };
        let ds = cast(&ds, products.grad_format)?;
        let p = cast(&self.dropped(&p)?, products.format)?;
        let finish = |x: Tensor, factor: f64| -> Result<Option<Tensor>> {
            Ok(Some(self.in_layout(&(x * factor)?)?.to_dtype(out_dtype)?))
        };
        let of_keys = |weights: &Tensor, rows: &Tensor| -> Result<Tensor> {
            let weights = self.grouped(weights)?.transpose(2, 3)?;
            Ok(weights.matmul(&self.grouped(rows)?)?)
        };
        let mut grads = [None, None, None];
        if wanted[0] {
            let dq = self.weighted_sums(&ds, &operand(k, fp8)?)?;
            grads[0] = finish(dq, self.softmax_scale)?;
        }
        if wanted[1] {
            grads[1] = finish(of_keys(&ds, &operand(q, fp8)?)?, self.softmax_scale)?;
        }
        if wanted[2] {
            grads[2] = finish(of_keys(&p, &operand(dy, fp8)?)?, 1.0)?;
        }
        Ok(grads)
    }

    /// A result with heads first in the layout of the call, contiguous.
    fn in_layout(&self, x: &Tensor) -> Result<Tensor> {
        match self.tokens_first {
            true => Ok(x.transpose(1, 2)?.contiguous()?),
            false => Ok(x.contiguous()?),
        }
    }
}
