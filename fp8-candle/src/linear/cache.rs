//! The quantized weight, kept until the weight changes.

use super::same_cast;
use crate::delayed::DelayedSlot;
use crate::device::backend;
use crate::packed::PackedWeight;
use crate::quantize::{Quantized, Quantizer, ScaleSource};
use crate::tensor::Fp8Tensor;
use candle_core::{DType, Result, Tensor, TensorId};
use fp8_core::Contraction;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Holds the FP8 copy of one layer's weight over micro-batches and evaluation.
///
/// A change is seen by a fingerprint of the weight's bits, so any optimizer and any `Var::set` is noticed. On a
/// device where a fingerprint would need a copy to the host nothing is cached.
///
/// Under delayed scaling a change of the weight records its amax once. The codes then stay, with the scale they
/// were made with, until the weight changes again; only codes made with the initial scale 1 are renewed as soon as
/// a real one is known, or a frozen weight would keep them for ever.
#[derive(Debug, Default)]
pub struct WeightCache(Mutex<Cached>);

#[derive(Debug, Default)]
struct Cached {
    entry: Option<Entry>,
    kept: Option<Kept>,
}

/// The scale of codes that are still to be made, see [`WeightCache::restore`].
#[derive(Debug)]
struct Kept {
    fingerprint: u64,
    quant_scale: Tensor,
}

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
    quant_scale: Tensor,
    quantized: Fp8Tensor,
    /// How often the codes have been used again.
    reuses: u32,
    /// The codes once more, as the device streams them.
    packed: Option<PackedWeight>,
}

/// How to get the codes.
enum Step {
    Use(Fp8Tensor),
    /// Make them, and keep the cached ones.
    MakeAside,
    /// Make and keep them; `recorded`: their amax was recorded before.
    Make {
        recorded: bool,
    },
    /// Make and keep them with this quant_scale.
    MakeKept(Tensor),
}

impl Cached {
    fn decide(
        &mut self,
        weight: &Tensor,
        fingerprint: u64,
        quantizer: &Quantizer,
        contraction: Contraction,
        now: (u64, u64),
    ) -> Step {
        if matches!(quantizer.source, ScaleSource::Delayed { .. })
            && let Some(kept) = self.kept.take()
            && kept.fingerprint == fingerprint
        {
            return Step::MakeKept(kept.quant_scale);
        }
        let Some(entry) = self.entry.as_mut().filter(|entry| {
            entry.id == weight.id()
                && entry.fingerprint == fingerprint
                && entry.contraction == contraction
                && entry.version.1 == now.1
                && same_cast(&entry.quantizer, quantizer)
        }) else {
            return Step::Make { recorded: false };
        };
        let fresh = entry.version == now;
        if matches!(quantizer.source, ScaleSource::Delayed { record: true, .. }) {
            if entry.recorded && (fresh || entry.version.0 > 0) {
                entry.reuses = entry.reuses.saturating_add(1);
                Step::Use(entry.quantized.clone())
            } else {
                Step::Make {
                    recorded: entry.recorded,
                }
            }
        } else if fresh {
            entry.reuses = entry.reuses.saturating_add(1);
            Step::Use(entry.quantized.clone())
        } else {
            // Evaluation must not disturb the codes of the training step in progress.
            Step::MakeAside
        }
    }
}

impl WeightCache {
    fn lock(&self) -> MutexGuard<'_, Cached> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Forgets the codes.
    pub fn clear(&self) {
        *self.lock() = Cached::default();
    }

    /// The quant_scale, f32 `[1]`, that the next training cast of `weight` will use instead of its slot's, because
    /// `weight` has not changed since its amax was recorded. None where that cast will make and record anew.
    ///
    /// A checkpoint needs it to go on bit-exactly: see [`WeightCache::restore`].
    pub fn kept_quant_scale(&self, weight: &Tensor) -> Result<Option<Tensor>> {
        let fingerprint = backend(weight.device())?.fingerprint(weight)?;
        let cached = self.lock();
        let Some(entry) = cached.entry.as_ref().filter(|entry| entry.recorded) else {
            return Ok(None);
        };
        let ScaleSource::Delayed { slot, .. } = &entry.quantizer.source else {
            return Ok(None);
        };
        let unchanged = entry.id == weight.id()
            && entry.version.1 == slot.version().1
            && fingerprint == Some(entry.fingerprint);
        Ok(unchanged.then(|| match entry.version.0 {
            // Codes made with the initial scale are renewed.
            0 => slot.tensors().quant_scale,
            _ => entry.quant_scale.clone(),
        }))
    }

    /// Forgets the codes; until `weight` changes its delayed casts use `quant_scale` (f32 `[1]`) and record nothing.
    pub fn restore(&self, weight: &Tensor, quant_scale: Tensor) -> Result<()> {
        let fingerprint = backend(weight.device())?.fingerprint(weight)?;
        let kept = fingerprint.map(|fingerprint| Kept {
            fingerprint,
            quant_scale,
        });
        *self.lock() = Cached { entry: None, kept };
        Ok(())
    }

    /// `codes` of this cache as the device streams them, for GEMMs of few rows; None where they may change before that
    /// pays. Kept as long as the codes.
    pub(super) fn packed(&self, codes: &Fp8Tensor) -> Result<Option<PackedWeight>> {
        // More often than micro-batches use a weight between two steps.
        const REUSES: u32 = 8;
        fn entry_of<'a>(cached: &'a mut Cached, codes: &Fp8Tensor) -> Option<&'a mut Entry> {
            let entry = cached.entry.as_mut();
            entry.filter(|entry| entry.quantized.codes().id() == codes.codes().id())
        }
        match entry_of(&mut self.lock(), codes) {
            Some(entry) if entry.reuses >= REUSES => {
                if let Some(packed) = &entry.packed {
                    return Ok(Some(packed.clone()));
                }
            }
            _ => return Ok(None),
        }
        // As casts, without the lock.
        let packed = PackedWeight::new(codes)?;
        if let Some(entry) = entry_of(&mut self.lock(), codes) {
            entry.packed = Some(packed.clone());
        }
        Ok(Some(packed))
    }

    /// The FP8 copy of `weight` under `quantizer`, from the cache where it still holds.
    pub fn quantize(
        &self,
        weight: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
    ) -> Result<Fp8Tensor> {
        self.quantize_for(weight, quantizer, contraction, false)
    }

    /// [`WeightCache::quantize`]; `both` as in [`Quantizer::quantize_for`], for devices where nothing is cached.
    pub(super) fn quantize_for(
        &self,
        weight: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Fp8Tensor> {
        let Some(fingerprint) = backend(weight.device())?.fingerprint(weight)? else {
            return Ok(quantizer.quantize_for(weight, contraction, both)?.tensor);
        };
        let slot = match &quantizer.source {
            ScaleSource::Delayed { slot, .. } | ScaleSource::Static(slot) => Some(slot),
            _ => None,
        };
        let records = matches!(&quantizer.source, ScaleSource::Delayed { record: true, .. });
        let version = || slot.map_or((1, 0), |slot| slot.version());

        // The casts below run on the thread pool, whose threads may take up another use of this layer while they
        // wait: the lock must not be held then.
        let step = self
            .lock()
            .decide(weight, fingerprint, quantizer, contraction, version());
        let store = |made: &Quantized, version, recorded| {
            self.lock().entry = Some(Entry {
                id: weight.id(),
                fingerprint,
                quantizer: quantizer.clone(),
                contraction,
                version,
                recorded,
                quant_scale: made.quant_scale.clone(),
                quantized: made.tensor.clone(),
                reuses: 0,
                packed: None,
            });
        };
        let made = match (step, slot) {
            (Step::Use(codes), _) => return Ok(codes),
            (Step::MakeAside, _) => return Ok(quantizer.quantize(weight, contraction)?.tensor),
            (Step::MakeKept(quant_scale), Some(slot)) => {
                let own = with_scale(quantizer, slot, &quant_scale)?;
                // Made in an earlier step, though with a real scale.
                store(
                    &own.quantize(weight, contraction)?,
                    (u64::MAX, slot.version().1),
                    true,
                );
                return self.quantize(weight, quantizer, contraction);
            }
            (Step::Make { recorded: true }, _) => {
                let made = without_record(quantizer).quantize(weight, contraction)?;
                store(&made, version(), true);
                made
            }
            (Step::Make { recorded: false } | Step::MakeKept(_), _) => {
                let made = quantizer.quantize(weight, contraction)?;
                store(&made, version(), records);
                made
            }
        };
        Ok(made.tensor)
    }
}

fn without_record(quantizer: &Quantizer) -> Quantizer {
    let mut quantizer = quantizer.clone();
    if let ScaleSource::Delayed { record, .. } = &mut quantizer.source {
        *record = false;
    }
    quantizer
}

/// The cast with a scale of its own in place of its slot's.
fn with_scale(
    quantizer: &Quantizer,
    slot: &DelayedSlot,
    quant_scale: &Tensor,
) -> Result<Quantizer> {
    let own = DelayedSlot::new(slot.name(), 1, slot.device())?;
    own.restore(quant_scale, &Tensor::zeros(1, DType::F32, slot.device())?)?;
    let source = ScaleSource::Delayed {
        slot: Arc::new(own),
        record: false,
        first_batch: None,
    };
    Ok(Quantizer {
        source,
        ..quantizer.clone()
    })
}
