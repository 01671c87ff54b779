//! The quantized weight, kept until the weight changes.

mod entries;

use crate::base::data::matrix_dims;
use crate::base::error::Result;
use crate::base::sync::lock;
use crate::cast::packed::PackedWeight;
use crate::cast::quantizer::Quantizer;
use crate::cast::spec::ScaleSource;
use crate::cast::state::{Slot, StepCells, is_non_finite};
use crate::cast::tensor::Fp8Tensor;
use crate::cast::weight_version::Seen;
use crate::device::{backend, is_recorded};
use candle_core::Tensor;
use entries::{Bad, Cached, Entry, Kept, Recorded, Request, Step};
use fp8_core::{Contraction, ScaleGrid};
use std::sync::{Arc, Mutex, MutexGuard};

/// How many casts of one weight are kept at the same time. The least recently used one is dropped first.
const ENTRIES: usize = 4;

/// Holds the FP8 copies of one layer's weight over micro-batches and evaluation, one for each cast and contraction.
///
/// A fingerprint of the weight's bits shows any change, by any optimizer or `Var::set`. On a device where a fingerprint would
/// need a copy to the host, codes are kept only for weights whose changes are announced, see [`crate::cast::weight_version`].
///
/// Under delayed scaling the amax is recorded once per change of the weight. The codes then stay, with the scale they were
/// made with, until the weight changes again. Only codes made with the initial scale, or one that was made by another rule, are
/// replaced as soon as the right one is known; otherwise a frozen weight would keep them forever.
#[derive(Debug, Default)]
pub struct WeightCache {
    cached: Mutex<Cached>,
    /// The version of the weight where changes have to be announced; held from its first use on, so that no announcement is missed.
    announced: Mutex<Option<Seen>>,
}

impl WeightCache {
    fn lock(&self) -> MutexGuard<'_, Cached> {
        lock(&self.cached)
    }

    /// The current values of `weight`; `None` if a change could not be noticed, or nothing is to be kept.
    fn see(&self, weight: &Tensor) -> Result<Option<Seen>> {
        if is_recorded(weight.device()) {
            // Codes cached now would belong to the graph, and every run of it has another weight.
            return Ok(None);
        }
        let seen = Seen::of(weight)?;
        if seen.is_announced() {
            let mut held = lock(&self.announced);
            *held = Some(seen.clone());
        }
        Ok(seen.shows_changes().then_some(seen))
    }

    /// Drops the codes.
    pub fn clear(&self) {
        *self.lock() = Cached::default();
    }

    /// The quant_scale, f32 `[1]`, that the next training cast of `weight` will use instead of its slot's, because
    /// `weight` has not changed since its amax was recorded. `None` if that cast will use the slot's scale and record an amax.
    ///
    /// A checkpoint needs it to continue bit-exactly, see [`WeightCache::restore`].
    pub fn kept_quant_scale(&self, weight: &Tensor) -> Result<Option<Tensor>> {
        let Some(now) = self.see(weight)? else {
            return Ok(None);
        };
        let cached = self.lock();
        let unchanged = cached.seen.as_ref() == Some(&now);
        let (true, Some(recorded), Some((entry, slot))) =
            (unchanged, &cached.recorded, cached.delayed_entry())
        else {
            return Ok(None);
        };
        let (_, epoch) = slot.version();
        if !recorded.holds(epoch) || entry.version.1 != epoch {
            return Ok(None);
        }
        Ok(Some(match entry.is_settled(&entry.source) {
            true => entry.quant_scale.clone(),
            // These codes are replaced.
            false => slot.tensors()?.quant_scale,
        }))
    }

    /// Whether `weight` has other values than those that `step`, the last one to train with it, has cast. False where that cannot be
    /// noticed.
    pub fn has_changed_since(&self, weight: &Tensor, step: &Arc<StepCells>) -> Result<bool> {
        let Some(now) = self.see(weight)? else {
            return Ok(false);
        };
        let cached = self.lock();
        Ok(cached.step.ptr_eq(&Arc::downgrade(step)) && cached.seen.as_ref() != Some(&now))
    }

    /// Drops the codes. Until `weight` changes, its delayed casts use `quant_scale` (f32 `[1]`) and record no amax.
    pub fn restore(&self, weight: &Tensor, quant_scale: Tensor) -> Result<()> {
        let kept = self.see(weight)?.map(|seen| Kept { seen, quant_scale });
        *self.lock() = Cached {
            kept,
            ..Cached::default()
        };
        Ok(())
    }

    /// `codes` of this cache, packed for GEMMs of few rows; `None` if they may change before packing pays off. Kept as long
    /// as the codes.
    pub(crate) fn packed(&self, codes: &Fp8Tensor) -> Result<Option<PackedWeight>> {
        // More than the usual number of micro-batches between two steps.
        const REUSES: u32 = 8;
        fn entry_of<'a>(cached: &'a mut Cached, codes: &Fp8Tensor) -> Option<&'a mut Entry> {
            let mut entries = cached.entries.iter_mut();
            entries.find(|entry| entry.quantized.codes().id() == codes.codes().id())
        }
        match entry_of(&mut self.lock(), codes) {
            Some(entry) if entry.reuses >= REUSES => {
                if let Some(packed) = &entry.packed {
                    return Ok(Some(packed.clone()));
                }
            }
            _ => return Ok(None),
        }
        // Without the lock, as for casts.
        let packed = PackedWeight::new(codes)?;
        if let Some(entry) = entry_of(&mut self.lock(), codes) {
            entry.packed = Some(packed.clone());
        }
        Ok(Some(packed))
    }

    /// The FP8 copy of `weight` under `quantizer`, from the cache if it is still valid.
    pub fn quantize(
        &self,
        weight: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
    ) -> Result<Fp8Tensor> {
        Ok(self
            .quantize_as(weight, weight, quantizer, contraction, false)?
            .0)
    }

    /// [`WeightCache::quantize`] of `matrix`, the values of `weight` in the shape and order in which this layer casts them for
    /// `contraction`; `both` as in [`Quantizer::quantize_for`]. With the values of the weight that the codes were made from.
    pub(crate) fn quantize_as(
        &self,
        weight: &Tensor,
        matrix: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<(Fp8Tensor, Seen)> {
        let uncached = || -> Result<_> {
            let seen = Seen::of(weight)?;
            let codes = quantizer.quantize_for(matrix, contraction, both)?.tensor;
            Ok((codes, seen))
        };
        let replay = quantizer.replay.as_ref();
        if let Some(replay) = replay.filter(|replay| replay.is_playing()) {
            return replay.codes().cloned().map_or_else(uncached, Ok);
        }
        let Some(seen) = self.see(weight)? else {
            return uncached();
        };
        let codes = self.quantize_seen((weight, &seen), matrix, quantizer, contraction, both)?;
        if let Some(replay) = replay {
            replay.record_codes(&codes, &seen);
        }
        Ok((codes, seen))
    }

    /// Tells a training step that it uses codes of values with Inf or NaN, once for each judgement of it.
    fn tell(&self, quantizer: &Quantizer) -> Result<()> {
        let recorder = quantizer.observers.training_recorder();
        let Some(recorder) = recorder.filter(|recorder| recorder.watches_amax) else {
            return Ok(());
        };
        let (step, looks) = (Arc::downgrade(&recorder.step), recorder.step.looks());
        let amax = match &mut self.lock().bad {
            Some(bad) if !(bad.told.0.ptr_eq(&step) && bad.told.1 == looks) => {
                bad.told = (step, looks);
                bad.amax.clone()
            }
            _ => return Ok(()),
        };
        recorder.step.record(recorder.row, &amax, false)
    }

    /// [`WeightCache::quantize_as`] of values whose changes are noticed.
    fn quantize_seen(
        &self,
        (weight, seen): (&Tensor, &Seen),
        matrix: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Fp8Tensor> {
        let request = Request {
            quantizer,
            contraction,
            both,
            now: quantizer.source.slot().map_or((1, 0), Slot::version),
        };
        // The casts below run on the thread pool, whose threads may start another call of this layer while they wait, so
        // the lock must not be held.
        let step = self.lock().decide(seen, &request);
        let settled = match (&step, &quantizer.source) {
            (Step::MakeKept(_), _) => true,
            (_, ScaleSource::Delayed { slot, rule, .. }) => slot.is_made_by(rule),
            _ => true,
        };
        self.tell(quantizer)?;
        let observed = match step {
            Step::Use(codes) => return Ok(codes),
            Step::Make { record: false } if request.is_delayed() => without_record(quantizer),
            Step::MakeAside | Step::Make { .. } => quantizer.clone(),
            Step::MakeKept(ref quant_scale) => with_scale(quantizer, quant_scale)?,
        };
        let made = observed.quantize_for(matrix, contraction, both)?;
        let (version, recorded) = match step {
            Step::MakeAside | Step::Use(_) => return Ok(made.tensor),
            Step::Make { record } => {
                let recorder = quantizer.observers.recorder.as_ref();
                let step = recorder.map(|recorder| recorder.step.clone());
                (request.now, record.then_some(step))
            }
            // Counts as made in an earlier step, with a real scale.
            Step::MakeKept(_) => ((u64::MAX, request.now.1), Some(None)),
        };
        let is_kept = matches!(step, Step::MakeKept(_));
        let amax = match is_kept && matrix.device().is_cpu() {
            // Its cast measures nothing: the amax is in the history already.
            true => Some(amax_of(matrix)?),
            false => made.amax.clone(),
        };
        let mut cached = self.lock();
        if cached.seen.as_ref() != Some(seen) {
            // In the meantime another thread has seen other values.
            return Ok(made.tensor);
        }
        if let Some(step) = recorded {
            let epoch = request.now.1;
            cached.recorded = Some(Recorded { step, epoch });
        }
        // A GPU does not tell the host; it makes the codes again in each step.
        if let Some(amax) = amax
            && amax.device().is_cpu()
            && is_non_finite(&amax)?
        {
            // A cast with a kept scale has told no step.
            let recorder = quantizer.observers.training_recorder();
            let told = recorder.filter(|_| !is_kept);
            let told = told.map(|recorder| (Arc::downgrade(&recorder.step), recorder.step.looks()));
            cached.bad = Some(Bad {
                amax,
                told: told.unwrap_or_default(),
            });
        }
        let outdated = |entry: &Entry| {
            request.fits(entry) || request.is_same_cast(entry) && entry.version.1 != request.now.1
        };
        cached.entries.retain(|entry| !outdated(entry));
        if cached.entries.len() == ENTRIES {
            cached.entries.remove(0);
        }
        cached.entries.push(Entry {
            spec: quantizer.spec.clone(),
            source: quantizer.source.clone(),
            contraction,
            both,
            trained: request.records() || is_kept,
            version,
            settled,
            quant_scale: made.quant_scale,
            quantized: made.tensor.clone(),
            reuses: 0,
            packed: None,
        });
        drop(cached);
        match is_kept {
            // Evaluation uses another scale, and a step in training is told of Inf and NaN.
            true => {
                let again = self.quantize_as(weight, matrix, quantizer, contraction, both)?;
                Ok(again.0)
            }
            false => Ok(made.tensor),
        }
    }
}

/// The amax `[1, 1]` of a matrix.
fn amax_of(matrix: &Tensor) -> Result<Tensor> {
    let (rows, cols) = matrix_dims(matrix.dims());
    let grid = ScaleGrid::tensorwise(rows, cols);
    backend(matrix.device())?.amax(&matrix.detach(), &grid)
}

/// The same cast, without recording an amax for later scales.
fn without_record(quantizer: &Quantizer) -> Quantizer {
    let mut quantizer = quantizer.clone();
    if let Some(recorder) = &mut quantizer.observers.recorder {
        recorder.record = false;
    }
    quantizer
}

/// The same cast, with this scale in place of its slot's.
fn with_scale(quantizer: &Quantizer, quant_scale: &Tensor) -> Result<Quantizer> {
    let source = ScaleSource::Known {
        quant_scale: quant_scale.clone(),
        dequant_scale: backend(quant_scale.device())?.reciprocal(quant_scale)?,
    };
    Ok(without_record(quantizer).with_source(source))
}
