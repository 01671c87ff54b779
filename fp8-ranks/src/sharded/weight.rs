//! The weight of a linear layer in parts, fetched in each pass.

use super::var::ShardedVar;
use crate::error::Error;
use candle_core::{DType, Device, Tensor};
use fp8_candle::{Quantized, Quantizer, Result, WeightSource};
use fp8_core::Contraction;
use std::sync::atomic::{AtomicBool, Ordering};

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

    /// Each rank casts its range, and codes travel: a quarter of the bytes.
    fn codes(&self, cast: &Quantizer, contraction: Contraction) -> Result<Option<Quantized>> {
        if !cast.casts_parts() {
            say_once(self.name());
            return Ok(None);
        }
        if self.claims() > 1 {
            return Err(Error::TiedCodes {
                name: self.name().to_string(),
                layers: self.claims(),
            }
            .into());
        }
        let own = cast.quantize_part(self.shard(), || self.whole_amax(cast.needs_amax()))?;
        // Ranks with other scales would read each other's codes wrongly. On a GPU the number would have to be waited for: there only the
        // layers' check of the recipe and the guard keeps delayed scales equal.
        let scale = match own.quant_scale.device() {
            Device::Cpu => own.quant_scale.reshape(())?.to_scalar::<f32>()?.to_bits(),
            _ => 0,
        };
        let codes = self.gather_codes(own.tensor.codes(), scale)?;
        own.whole(&codes, ShardedVar::dims(self), contraction)
            .map(Some)
    }

    fn gradient(&self, whole: Tensor) -> Result<Tensor> {
        Ok(self.scatter(&whole)?)
    }
}

/// Says once per process that a weight travels in f32 although codes were asked for.
fn say_once(name: &str) {
    static SAID: AtomicBool = AtomicBool::new(false);
    if !SAID.swap(true, Ordering::Relaxed) {
        tracing::warn!(
            "enable_fp8_all_gather: `{name}` travels in f32, as may other weights: only casts with one scale for the whole tensor, \
             without stochastic rounding and without statistics, can be made of parts"
        );
    }
}
