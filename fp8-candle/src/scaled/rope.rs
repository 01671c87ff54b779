//! Rotary position embedding.

use super::value::Scaled;
use crate::base::error::Result;
use crate::ops;
use candle_core::Tensor;

impl Scaled {
    /// Rotary position embedding, half-split, as [`ops::rope`](crate::ops::rope): `[batch, heads, time, even size]`, with plain
    /// tables `cos` and `sin` of any float dtype. Scale: that of the input.
    ///
    /// # Errors
    /// If the shapes do not fit.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[[[[1f32, 0.0]]]], &Device::Cpu)?, 16.0)?;
    /// let (cos, sin) = (Tensor::new(&[[0f32]], &Device::Cpu)?, Tensor::new(&[[1f32]], &Device::Cpu)?);
    /// assert_eq!(x.rope(&cos, &sin)?.reshape(&[2])?.to_vec1()?, [0.0, 16.0]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn rope(&self, cos: &Tensor, sin: &Tensor) -> Result<Self> {
        let x = self.data()?;
        let cos = cos.detach().to_dtype(x.dtype())?;
        let sin = sin.detach().to_dtype(x.dtype())?;
        let value = Self::new(ops::rope(&x, &cos, &sin)?, self.scale());
        let dtype = x.dtype();
        Ok(Self::record(value, "rope", [self], move |g, _| {
            // The inverse rotation.
            let data = ops::rope(&g.float(dtype)?, &cos, &sin.neg()?)?;
            Ok([Some(Self::new(data, g.scale()))])
        }))
    }
}
