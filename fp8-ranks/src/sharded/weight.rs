//! The weight of a linear layer in parts, fetched in each pass.

use super::var::ShardedVar;
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Quantized, Quantizer, Result, WeightSource};
use fp8_core::Contraction;

impl WeightSource for ShardedVar {
    fn name(&self) -> &str {
        ShardedVar::name(self)
    }

    fn dims(&self) -> &[usize] {
        ShardedVar::dims(self)
    }

    fn dtype(&self) -> DType {
        ShardedVar::dtype(self)
    }

    fn device(&self) -> &Device {
        ShardedVar::device(self)
    }

    fn variable(&self) -> &Tensor {
        self.shard()
    }

    fn values(&self) -> Result<Tensor> {
        Ok(self.gather()?)
    }

    fn codes(&self, _: &Quantizer, _: Contraction) -> Result<Option<Quantized>> {
        Ok(None)
    }

    fn gradient(&self, whole: Tensor) -> Result<Tensor> {
        Ok(self.scatter(&whole)?)
    }
}
