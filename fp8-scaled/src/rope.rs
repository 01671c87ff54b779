//! Rotary position embedding.

use super::error::Result;
use super::value::Scaled;
use candle_core::Tensor;
use fp8_candle::ops;

impl Scaled {
    /// Rotary position embedding, half-split, as [`ops::rope`](fp8_candle::ops::rope): `[batch, heads, time, even size]`, with plain
    /// tables `cos` and `sin` of any float dtype. Scale: that of the input.
    ///
    /// # Errors
    /// If the shapes do not fit.
    pub fn rope(&self, cos: &Tensor, sin: &Tensor) -> Result<Self> {
        let x = self.data()?;
        let cos = cos.detach().to_dtype(x.dtype())?;
        let sin = sin.detach().to_dtype(x.dtype())?;
        let value = Self::new(ops::rope(&x, &cos, &sin)?, self.scale());
        let dtype = x.dtype();
        Ok(self.recorded(value, "rope", move |g| {
            // The inverse rotation.
            let data = ops::rope(&g.float(dtype)?, &cos, &sin.neg()?)?;
            Ok(Self::new(data, g.scale()))
        }))
    }
}
