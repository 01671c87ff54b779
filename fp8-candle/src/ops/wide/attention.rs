//! Attention of a wide node.

use crate::base::data::attention::Attention;
use crate::base::error::Result;
use crate::cast::kept::KeptTensor;
use crate::device::cpu::elements::to_bf16;
use crate::graph::wide::{Wide, WideNode};
use crate::ops::{AttentionOptions, rope};
use candle_core::Tensor;

impl WideNode {
    /// Rotary positions of `x` `[b, t, h, d]`: [`rope`], or [`rope_i`](crate::ops::rope_i) if `interleaved`,
    /// with tokens before heads. No gradient goes to the angles.
    ///
    /// # Errors
    /// As [`rope`].
    pub fn rope(
        &mut self,
        x: &Wide,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
    ) -> Result<Wide> {
        let (cos, sin) = (cos.detach(), sin.detach());
        let tensor = rope::tokens_first(x.value.get()?, &cos, &sin, interleaved, false)?;
        let id = x.id;
        Ok(self.record_tensor(tensor, &[id], move |sweep, grad| {
            let grad = grad.contiguous()?;
            let dx = rope::tokens_first(&grad, &cos, &sin, interleaved, true)?;
            sweep.add(id, dx)
        }))
    }

    /// [`attention_tokens_first`](crate::ops::attention_tokens_first): q `[b, tq, h, d]`, k and v `[b, tk, h_kv, d]`, result `[b, tq, h, d]`.
    ///
    /// # Errors
    /// As [`attention_tokens_first`](crate::ops::attention_tokens_first).
    pub fn attention(&mut self, qkv: [&Wide; 3], options: &AttentionOptions) -> Result<Wide> {
        let [q, k, v] = qkv.map(|x| x.value.get());
        let tensors = [q?, k?, v?];
        let mut attention = Attention::new(tensors, options, true)?;
        let dtype = tensors[0].dtype();
        let ids = qkv.map(|x| x.id);
        if attention.products.any() {
            return self.fp8_attention(attention, tensors.map(Tensor::clone), ids);
        }
        // Copies in bf16 give the same bits where the products are in bf16.
        let copies = match attention.reads_bf16_copies(tensors[0])? {
            true => tensors.map(to_bf16),
            false => tensors.map(|x| Ok(x.clone())),
        };
        let [q, k, v] = copies;
        let copies = [q?, k?, v?];
        let is_tracked = ids.iter().any(Option::is_some);
        let (tensor, saved) = attention.forward(copies.each_ref(), dtype, is_tracked)?;
        let [q, k, v] = copies.map(|x| self.keep_head(x, is_tracked));
        let kept = [q?, k?, v?];
        attention.normalizes = kept.iter().any(KeptTensor::rounds);
        Ok(self.record_tensor(tensor, &ids, move |sweep, grad| {
            let wanted = ids.map(|id| id.is_some());
            let grads = attention.backward_of_kept(&kept, &saved, grad, wanted)?;
            for (id, grad) in ids.into_iter().zip(grads) {
                if let Some(grad) = grad {
                    sweep.add(id, grad.to_dtype(dtype)?)?;
                }
            }
            Ok(())
        }))
    }

    /// Attention with products in FP8, which keeps the codes that it multiplies; what other products read is kept as elsewhere.
    fn fp8_attention(
        &mut self,
        mut attention: Attention,
        qkv: [Tensor; 3],
        ids: [Option<usize>; 3],
    ) -> Result<Wide> {
        let dtype = qkv[0].dtype();
        let is_tracked = ids.iter().any(Option::is_some);
        let (tensor, mut saved) = attention.forward(qkv.each_ref(), dtype, is_tracked)?;
        let values = saved.take_values();
        let values = values.map(|x| x.map(|x| self.keep_head(x, is_tracked)).transpose());
        let [q, k, v] = values;
        let kept = [q?, k?, v?];
        // Scores in FP8 have their own codes, whatever else is rounded.
        attention.normalizes =
            !attention.products.scores && kept[..2].iter().flatten().any(KeptTensor::rounds);
        Ok(self.record_tensor(tensor, &ids, move |sweep, grad| {
            let wanted = ids.map(|id| id.is_some());
            let [q, k, v] = (kept.each_ref()).map(|x| x.as_ref().map(KeptTensor::get).transpose());
            let saved = saved.with_values([q?, k?, v?]);
            let grads = attention.saved_gradients(&saved, grad, wanted)?;
            for (id, grad) in ids.into_iter().zip(grads) {
                if let Some(grad) = grad {
                    sweep.add(id, grad.to_dtype(dtype)?)?;
                }
            }
            Ok(())
        }))
    }
}
