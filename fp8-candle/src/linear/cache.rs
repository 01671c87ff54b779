//! The quantized weight, kept until the weight changes.

use super::serves_both;
use crate::device::backend;
use crate::quantize::{Quantizer, ScaleSource};
use crate::tensor::Fp8Tensor;
use candle_core::{Result, Tensor, TensorId};
use fp8_core::Contraction;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Holds the FP8 copy of one layer's weight over micro-batches and evaluation.
///
/// A change is seen by a fingerprint of the weight's bits, so any optimizer and any `Var::set` is noticed. On a
/// device where a fingerprint would need a copy to the host nothing is cached.
///
/// Under delayed scaling a change of the weight records its amax once. The codes then stay, with the scale they
/// were made with, until the weight changes again; only codes made with the initial scale 1 are renewed as soon as
/// a real one is known, or a frozen weight would keep them for ever.
#[derive(Debug, Default)]
pub struct WeightCache(Mutex<Option<Entry>>);

#[derive(Debug)]
struct Entry {
    id: TensorId,
    fingerprint: u64,
    quantizer: Quantizer,
    contraction: Contraction,
    /// Version of the slot when the codes were made.
    version: (u64, u64),
    /// Whether this state of the weight has recorded its amax.
    recorded: bool,
    quantized: Fp8Tensor,
}

impl WeightCache {
    fn lock(&self) -> MutexGuard<'_, Option<Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the codes.
    pub fn clear(&self) {
        *self.lock() = None;
    }

    /// The FP8 copy of `weight` under `quantizer`, from the cache where it still holds.
    pub fn quantize(
        &self,
        weight: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
    ) -> Result<Fp8Tensor> {
        let Some(fingerprint) = backend(weight.device())?.fingerprint(weight)? else {
            return Ok(quantizer.quantize(weight, contraction)?.tensor);
        };
        let slot = match &quantizer.source {
            ScaleSource::Delayed { slot, .. } | ScaleSource::Static(slot) => Some(slot),
            _ => None,
        };
        let records = matches!(&quantizer.source, ScaleSource::Delayed { record: true, .. });
        let version = || slot.map_or((1, 0), |slot| slot.version());

        let mut cached = self.lock();
        let mut recorded = false;
        if let Some(entry) = cached.as_ref() {
            let same = entry.id == weight.id()
                && entry.fingerprint == fingerprint
                && entry.contraction == contraction
                && same_cast(&entry.quantizer, quantizer);
            let now = version();
            if same && entry.version.1 == now.1 {
                let fresh = entry.version == now;
                if records {
                    recorded = entry.recorded;
                    if recorded && (fresh || entry.version.0 > 0) {
                        return Ok(entry.quantized.clone());
                    }
                } else if fresh {
                    return Ok(entry.quantized.clone());
                } else {
                    // Evaluation must not disturb the codes of the training step in progress.
                    return Ok(quantizer.quantize(weight, contraction)?.tensor);
                }
            }
        }
        let quantized = if recorded {
            without_record(quantizer).quantize(weight, contraction)?.tensor
        } else {
            quantizer.quantize(weight, contraction)?.tensor
        };
        *cached = Some(Entry {
            id: weight.id(),
            fingerprint,
            quantizer: quantizer.clone(),
            contraction,
            version: version(),
            recorded: recorded || records,
            quantized: quantized.clone(),
        });
        Ok(quantized)
    }
}

fn without_record(quantizer: &Quantizer) -> Quantizer {
    let mut quantizer = quantizer.clone();
    if let ScaleSource::Delayed { record, .. } = &mut quantizer.source {
        *record = false;
    }
    quantizer
}

/// The same format, granularity and source of scales.
fn same_cast(a: &Quantizer, b: &Quantizer) -> bool {
    if a.is_symmetric() {
        return serves_both(a, b);
    }
    let source = match (&a.source, &b.source) {
        (
            ScaleSource::Current { policy: a, power_of_two: a2 },
            ScaleSource::Current { policy: b, power_of_two: b2 },
        ) => a == b && a2 == b2,
        _ => false,
    };
    source && a.cast == b.cast && a.granularity == b.granularity
}
