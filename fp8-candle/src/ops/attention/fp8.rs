//! Attention with products in FP8: both passes.

use super::operands::{KeptOperands, Part, Saved};
use crate::base::data::attention::Attention;
use crate::base::data::attention_products::BackwardOperands;
use crate::base::data::storage::take_storage;
use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use candle_core::{DType, Storage, Tensor};

impl Attention {
    /// [`Attention::forward`] with products in FP8; q is not empty.
    pub(super) fn forward_fp8(
        &self,
        qkv: [&Tensor; 3],
        out_dtype: DType,
        keeps: bool,
    ) -> Result<(Storage, Saved)> {
        let products = self.products;
        if let (Some(kernels), false) = (self.kernels(qkv[0])?, keeps) {
            let fp8 = [products.scores, products.scores, products.values];
            let operands = [0, 1, 2].map(|i| Part::read_once(qkv[i], products.format, fp8[i]));
            let dtypes = [qkv[0].dtype(), out_dtype];
            let (storage, _) = kernels.forward_fp8(self, operands, dtypes)?;
            return Ok((storage, Saved::default()));
        }
        let qk_uses = [products.scores, products.grad_inputs];
        let uses = [
            &qk_uses[..],
            &qk_uses,
            &[products.values, products.grad_probabilities],
        ];
        let part = |i: usize| Part::new(qkv[i], products.format, uses[i]);
        let parts = [part(0)?, part(1)?, part(2)?];
        let kernels = self.kernels(qkv[0])?;
        let (storage, lse) = match kernels {
            Some(kernels) => {
                let operands = [
                    parts[0].operand(products.scores)?,
                    parts[1].operand(products.scores)?,
                    parts[2].operand(products.values)?,
                ];
                let dtypes = [qkv[0].dtype(), out_dtype];
                let (storage, lse) = kernels.forward_fp8(self, operands, dtypes)?;
                (storage, Some(lse))
            }
            None => {
                let y = self.composed_fp8(parts.each_ref(), qkv[0].dtype())?;
                (take_storage(y.to_dtype(out_dtype)?.contiguous()?)?, None)
            }
        };
        let dtype = qkv[0].dtype();
        let in_bf16 = kernels.is_some() && self.exact_in_bf16(dtype)[1];
        let [q, k, v] = parts;
        let qkv = [
            q.kept(&qk_uses, in_bf16)?,
            k.kept(&qk_uses, in_bf16)?,
            v.kept(&[products.grad_probabilities], in_bf16)?,
        ];
        let saved = Saved {
            lse,
            result: None,
            operands: Some(KeptOperands { qkv, dtype }),
        };
        Ok((storage, saved))
    }

    /// [`Attention::backward`] with products in FP8, from what the forward pass has saved. None after one without queries.
    pub(crate) fn saved_gradients(
        &self,
        saved: &Saved,
        grad: &Tensor,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        let (Some(kept), lse) = (&saved.operands, saved.lse.as_ref()) else {
            return Ok([None, None, None]);
        };
        let _scope = enter(Kind::Attention);
        let products = self.products;
        let (uses, format) = (
            [products.grad_probabilities, products.grad_inputs],
            products.grad_format,
        );
        let Some((kernels, lse)) = self.kernels(grad)?.zip(lse) else {
            let dy = Part::new(&grad.detach(), format, &uses)?;
            return self.composed_gradients_fp8(kept, &dy, grad.dtype(), wanted);
        };
        let dy = uses.map(|fp8| Part::read_once(grad, format, fp8));
        let [q, k, v] = &kept.qkv;
        let operands = BackwardOperands {
            scores: [q.operand(products.scores)?, k.operand(products.scores)?],
            grad_probabilities: [dy[0], v.operand(uses[0])?],
            grad_inputs: [q.operand(uses[1])?, k.operand(uses[1])?, dy[1]],
        };
        let dtypes = [kept.dtype, grad.dtype()];
        kernels.backward_fp8(self, operands, lse, dtypes, wanted)
    }
}
