//! Attention of a wide node.

use super::kept::Kept;
use super::{Wide, WideNode};
use crate::error::Result;
use crate::ops::{AttentionOptions, attention_tokens_first, rope};
use candle_core::Tensor;

impl WideNode {
    /// Rotary positions of `x` `[b, t, h, d]`: [`rope`](crate::ops::rope), or [`rope_i`](crate::ops::rope_i) if `interleaved`,
    /// with tokens before heads. No gradient goes to the angles.
    ///
    /// # Errors
    /// As [`rope`](crate::ops::rope).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::WideNode;
    /// let (cos, sin) = (Tensor::new(&[[0f32]], &Device::Cpu)?, Tensor::new(&[[1f32]], &Device::Cpu)?);
    /// let mut node = WideNode::new("rope");
    /// let x = node.argument(&Tensor::new(&[[[[1f32, 2.]]]], &Device::Cpu)?);
    /// let y = node.rope(&x, &cos, &sin, false)?;
    /// assert_eq!(y.tensor().flatten_all()?.to_vec1::<f32>()?, [-2., 1.]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn rope(
        &mut self,
        x: &Wide,
        cos: &Tensor,
        sin: &Tensor,
        interleaved: bool,
    ) -> Result<Wide> {
        let (cos, sin) = (cos.detach(), sin.detach());
        let tensor = rope::tokens_first(&x.tensor, &cos, &sin, interleaved, false)?;
        let (id, kept) = (x.id, Kept::Tensor(tensor.clone()));
        Ok(self.record(tensor, kept, &[id], move |sweep, grad| {
            let grad = grad.contiguous()?;
            sweep.add(
                id,
                rope::tokens_first(&grad, &cos, &sin, interleaved, true)?,
            )
        }))
    }

    /// [`attention_tokens_first`]: q `[b, tq, h, d]`, k and v `[b, tk, h_kv, d]`, result `[b, tq, h, d]`.
    ///
    /// # Errors
    /// As [`attention_tokens_first`].
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::{WideNode, ops::AttentionOptions};
    /// let mut node = WideNode::new("attention");
    /// let x = node.argument(&Tensor::randn(0f32, 1., (1, 5, 2, 8), &Device::Cpu)?);
    /// let y = node.attention([&x, &x, &x], AttentionOptions::default())?;
    /// assert_eq!(y.dims(), [1, 5, 2, 8]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn attention(&mut self, qkv: [&Wide; 3], options: AttentionOptions) -> Result<Wide> {
        self.apply(&qkv, move |args| match args {
            [q, k, v] => attention_tokens_first(q, k, v, options),
            _ => crate::error::internal!("attention of {} tensors", args.len()),
        })
    }
}
