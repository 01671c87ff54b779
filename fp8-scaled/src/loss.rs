//! Cross entropy.

use super::error::Result;
use super::parts::{factored, sized};
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_candle::ops::{CrossEntropyOptions, detached};
use fp8_core::scaled::{Scale, constant_rule, mul_rule};

impl Scaled {
    /// Mean negative log likelihood of integer targets `[..]` under the softmax of the values `[.., classes]`:
    /// [`ops::cross_entropy`](fp8_candle::ops::cross_entropy). A scalar in f32 (f64 for f64 data). Scale: 1.
    ///
    /// # Errors
    /// As [`ops::cross_entropy`](fp8_candle::ops::cross_entropy).
    pub fn cross_entropy(&self, targets: &Tensor) -> Result<Self> {
        self.cross_entropy_with(targets, CrossEntropyOptions::default())
    }

    /// [`Scaled::cross_entropy`] with options.
    ///
    /// # Errors
    /// As [`Scaled::cross_entropy`].
    pub fn cross_entropy_with(
        &self,
        targets: &Tensor,
        options: CrossEntropyOptions,
    ) -> Result<Self> {
        let op = "cross_entropy";
        let (logits, size) = sized(self)?;
        let (loss, gradient) = detached::cross_entropy(&logits, size, targets, options)?;
        let value = Self::new(loss, Scale::ONE);
        let positions = targets.elem_count().max(1);
        Ok(self.recorded(value, op, move |g| {
            // The mean is a factor 1 / positions, whose power of two goes into the scale.
            let (power, _) = constant_rule(1.0 / positions as f64);
            let rule = mul_rule(g.scale(), power);
            let g_data = g.float(DType::F64)?.reshape(())?.to_scalar::<f64>()?;
            let factor = g_data / f64::from(power.to_f32());
            let data = gradient(factor)?;
            factored(op, &data, &rule)
        }))
    }
}
