//! The quantized weight, kept until the weight changes.

use crate::base::error::Result;
use crate::cast::packed::PackedWeight;
use crate::cast::quantize::Quantizer;
use crate::cast::recall::Recall;
use crate::cast::same::same_cast;
use crate::cast::scale_source::{FirstScale, ScaleSource};
use crate::cast::state::{Role, Slot, StepCells, is_non_finite};
use crate::cast::tensor::Fp8Tensor;
use crate::cast::weight_version::{Seen, WeightVersion};
use crate::device::backend;
use candle_core::{DType, Tensor, TensorId};
use fp8_core::{Contraction, DelayedRule};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

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
    /// The weight's version, where changes have to be announced; held from its first use on, so that none is missed.
    version: Mutex<Option<(TensorId, WeightVersion)>>,
}

#[derive(Debug, Default)]
struct Cached {
    /// The values that the entries were made from.
    seen: Option<Identity>,
    /// The step that has last trained with the weight.
    step: Weak<StepCells>,
    /// Whether the amax of these values was recorded.
    recorded: Option<Recorded>,
    /// The most recently used one is the last.
    entries: Vec<Entry>,
    kept: Option<Kept>,
    /// Set where the values hold Inf or NaN.
    bad: Option<Bad>,
}

/// A weight with Inf or NaN: its codes hide that from the steps that reuse them, so that each of them is told.
#[derive(Debug)]
struct Bad {
    amax: Tensor,
    /// The last step that knows.
    told: Weak<StepCells>,
}

/// What identifies the values of a weight.
#[derive(Debug, Clone)]
struct Identity {
    id: TensorId,
    values: Values,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Values {
    Fingerprint(u64),
    Announced(u64),
}

impl Identity {
    fn is(&self, other: &Self) -> bool {
        self.id == other.id && self.values == other.values
    }
}

/// When the amax of the weight was recorded.
#[derive(Debug, Clone)]
struct Recorded {
    /// `None`: before the state was loaded.
    step: Option<Arc<StepCells>>,
    /// The epoch of the slot: a scale set from outside starts a new one.
    epoch: u64,
}

impl Recorded {
    fn holds(&self, epoch: u64) -> bool {
        self.epoch == epoch && !self.step.as_ref().is_some_and(|step| step.is_aborted())
    }
}

/// The scale of codes to be made later, see [`WeightCache::restore`].
#[derive(Debug)]
struct Kept {
    values: Values,
    quant_scale: Tensor,
}

#[derive(Debug)]
struct Entry {
    quantizer: Quantizer,
    contraction: Contraction,
    /// Whether the codes were made for GEMMs over both dimensions.
    both: bool,
    /// Whether a training cast made them.
    trained: bool,
    /// Version of the slot when the codes were made.
    version: (u64, u64),
    /// Whether the slot's scale was made by the rule of `quantizer`.
    settled: bool,
    quant_scale: Tensor,
    quantized: Fp8Tensor,
    /// How often the codes have been reused.
    reuses: u32,
    /// The codes again, packed for the device.
    packed: Option<PackedWeight>,
}

impl Entry {
    /// Whether the codes stay, although the slot may have another scale by now.
    fn is_settled(&self, source: &ScaleSource) -> bool {
        let same_rule = match (&self.quantizer.source, source) {
            (ScaleSource::Delayed { rule: a, .. }, ScaleSource::Delayed { rule: b, .. }) => a == b,
            _ => true,
        };
        self.version.0 > 0 && self.settled && same_rule
    }
}

/// How to get the codes.
enum Step {
    Use(Fp8Tensor),
    /// Make them without replacing the cached ones.
    MakeAside,
    /// Make and keep them; `record` if their amax was not recorded before.
    Make {
        record: bool,
    },
    /// Make and keep them with this quant_scale.
    MakeKept(Tensor),
}

/// One request for codes.
struct Request<'a> {
    quantizer: &'a Quantizer,
    contraction: Contraction,
    both: bool,
    /// Current version of the slot.
    now: (u64, u64),
}

impl Request<'_> {
    fn is_delayed(&self) -> bool {
        matches!(self.quantizer.source, ScaleSource::Delayed { .. })
    }

    fn records(&self) -> bool {
        self.is_delayed() && self.quantizer.observer.as_ref().is_some_and(|o| o.record)
    }

    fn fits(&self, entry: &Entry) -> bool {
        let same_first = match (&self.quantizer.source, &entry.quantizer.source) {
            (ScaleSource::Delayed { first: a, .. }, ScaleSource::Delayed { first: b, .. }) => {
                // Initial scales differ between the two; scales made by an update do not.
                a == b || entry.version.0 > 0
            }
            _ => true,
        };
        same_first
            && entry.contraction == self.contraction
            && (entry.both || !self.both)
            && entry.version.1 == self.now.1
            && same_cast(&entry.quantizer, self.quantizer)
    }
}

impl Cached {
    fn decide(&mut self, seen: &Identity, request: &Request<'_>) -> Step {
        let unchanged = self.seen.as_ref().is_some_and(|before| before.is(seen));
        if let Some(observer) = request.quantizer.observer.as_ref().filter(|o| o.record) {
            let step = Arc::downgrade(&observer.step);
            if !unchanged && self.step.ptr_eq(&step) {
                observer.step.note_changed_weight();
            }
            self.step = step;
        }
        if !unchanged {
            self.seen = Some(seen.clone());
            self.recorded = None;
            self.entries.clear();
            self.bad = None;
        }
        if let ScaleSource::Delayed { slot, .. } = &request.quantizer.source
            && slot.is_made_for(request.quantizer.cast.format)
            && let Some(kept) = self.kept.take()
            && kept.values == seen.values
        {
            let epoch = request.now.1;
            self.recorded = Some(Recorded { step: None, epoch });
            return Step::MakeKept(kept.quant_scale);
        }
        let recorded = (self.recorded.as_ref()).is_some_and(|before| before.holds(request.now.1));
        let Some(at) = self.entries.iter().position(|entry| request.fits(entry)) else {
            let record = request.records() && !recorded;
            return Step::Make { record };
        };
        let entry = &mut self.entries[at];
        let fresh = entry.version == request.now;
        let usable = match request.records() {
            true => recorded && (fresh || entry.is_settled(&request.quantizer.source)),
            false => fresh,
        };
        if usable {
            entry.reuses = entry.reuses.saturating_add(1);
            let codes = entry.quantized.clone();
            // The most recently used one is the last.
            self.entries[at..].rotate_left(1);
            return Step::Use(codes);
        }
        match request.records() {
            true => Step::Make { record: !recorded },
            // Evaluation must not disturb the codes of the training step in progress.
            false => Step::MakeAside,
        }
    }

    /// The codes that a training cast of these values would reuse.
    fn delayed_entry(&self) -> Option<(&Entry, &Slot)> {
        let mut trained = self.entries.iter().rev().filter(|entry| entry.trained);
        trained.find_map(|entry| match &entry.quantizer.source {
            ScaleSource::Delayed { slot, .. } => Some((entry, slot)),
            _ => None,
        })
    }
}

impl WeightCache {
    fn lock(&self) -> MutexGuard<'_, Cached> {
        self.cached.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The current values of `weight`; `None` if a change could not be noticed.
    fn see(&self, weight: &Tensor) -> Result<Option<Identity>> {
        let values = match backend(weight.device())?.fingerprint(weight)? {
            Some(fingerprint) => Values::Fingerprint(fingerprint),
            None => {
                let mut held = self.version.lock().unwrap_or_else(PoisonError::into_inner);
                let version = match &*held {
                    Some((id, version)) if *id == weight.id() => version.clone(),
                    _ => WeightVersion::of(weight),
                };
                *held = Some((weight.id(), version.clone()));
                match version.get() {
                    0 => return Ok(None),
                    announced => Values::Announced(announced),
                }
            }
        };
        Ok(Some(Identity {
            id: weight.id(),
            values,
        }))
    }

    /// Drops the codes.
    pub fn clear(&self) {
        *self.lock() = Cached::default();
    }

    /// The quant_scale, f32 `[1]`, that the next training cast of `weight` will use instead of its slot's, because
    /// `weight` has not changed since its amax was recorded. `None` if that cast will use the slot's and record.
    ///
    /// A checkpoint needs it to continue bit-exactly, see [`WeightCache::restore`].
    pub fn kept_quant_scale(&self, weight: &Tensor) -> Result<Option<Tensor>> {
        let Some(now) = self.see(weight)? else {
            return Ok(None);
        };
        let cached = self.lock();
        let unchanged = cached.seen.as_ref().is_some_and(|seen| seen.is(&now));
        let (true, Some(recorded), Some((entry, slot))) =
            (unchanged, &cached.recorded, cached.delayed_entry())
        else {
            return Ok(None);
        };
        let (_, epoch) = slot.version();
        if !recorded.holds(epoch) || entry.version.1 != epoch {
            return Ok(None);
        }
        Ok(Some(match entry.is_settled(&entry.quantizer.source) {
            true => entry.quant_scale.clone(),
            // These codes are replaced.
            false => slot.tensors()?.quant_scale,
        }))
    }

    /// Drops the codes. Until `weight` changes, its delayed casts use `quant_scale` (f32 `[1]`) and record nothing.
    pub fn restore(&self, weight: &Tensor, quant_scale: Tensor) -> Result<()> {
        let kept = self.see(weight)?.map(|seen| Kept {
            values: seen.values,
            quant_scale,
        });
        *self.lock() = Cached {
            kept,
            ..Cached::default()
        };
        Ok(())
    }

    /// `codes` of this cache, packed for GEMMs of few rows; `None` if they may change before packing pays off. Kept as long
    /// as the codes.
    pub(super) fn packed(&self, codes: &Fp8Tensor) -> Result<Option<PackedWeight>> {
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
        Ok(self.quantize_for(weight, quantizer, contraction, false)?.0)
    }

    /// [`WeightCache::quantize`]; `both` as in [`Quantizer::quantize_for`]. With the values of the weight that the codes
    /// were made from.
    pub(super) fn quantize_for(
        &self,
        weight: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<(Fp8Tensor, Seen)> {
        self.quantize_as(weight, weight, quantizer, contraction, both)
    }

    /// [`WeightCache::quantize_for`] of `matrix`: the values of `weight` in the shape and order in which this layer casts
    /// them for `contraction`.
    pub(crate) fn quantize_as(
        &self,
        weight: &Tensor,
        matrix: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<(Fp8Tensor, Seen)> {
        let uncached = || -> Result<_> {
            let version = Seen::of(weight)?;
            let codes = quantizer.quantize_for(matrix, contraction, both)?.tensor;
            Ok((codes, version))
        };
        if let Some(recall @ Recall::Repeat(_)) = &quantizer.recall {
            return match recall.codes() {
                Some((codes, version)) => Ok((codes.clone(), version.clone())),
                None => uncached(),
            };
        }
        let Some(seen) = self.see(weight)? else {
            return uncached();
        };
        let version = match seen.values {
            Values::Fingerprint(fingerprint) => Seen::with_fingerprint(fingerprint),
            Values::Announced(_) => Seen::of(weight)?,
        };
        let codes = self.quantize_seen((weight, seen), matrix, quantizer, contraction, both)?;
        if let Some(recall) = &quantizer.recall {
            recall.note_codes(&codes, &version);
        }
        Ok((codes, version))
    }

    /// Tells a training step that uses codes of values with Inf or NaN, once.
    fn tell(&self, quantizer: &Quantizer) -> Result<()> {
        let observer = quantizer.observer.as_ref();
        let Some(observer) = observer.filter(|o| o.record && o.watches_amax) else {
            return Ok(());
        };
        let step = Arc::downgrade(&observer.step);
        let amax = match &mut self.lock().bad {
            Some(bad) if !bad.told.ptr_eq(&step) => {
                bad.told = step;
                bad.amax.clone()
            }
            _ => return Ok(()),
        };
        observer.step.record(observer.row, &amax, false)
    }

    /// [`WeightCache::quantize_as`] of values whose changes are noticed.
    fn quantize_seen(
        &self,
        (weight, seen): (&Tensor, Identity),
        matrix: &Tensor,
        quantizer: &Quantizer,
        contraction: Contraction,
        both: bool,
    ) -> Result<Fp8Tensor> {
        let slot = match &quantizer.source {
            ScaleSource::Delayed { slot, .. } | ScaleSource::Static(slot) => Some(slot),
            _ => None,
        };
        let request = Request {
            quantizer,
            contraction,
            both,
            now: slot.map_or((1, 0), Slot::version),
        };
        // The casts below run on the thread pool, whose threads may start another call of this layer while they wait, so
        // the lock must not be held.
        let step = self.lock().decide(&seen, &request);
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
                let step = quantizer.observer.as_ref().map(|o| o.step.clone());
                (request.now, record.then_some(step))
            }
            // Counts as made in an earlier step, with a real scale.
            Step::MakeKept(_) => ((u64::MAX, request.now.1), Some(None)),
        };
        let mut cached = self.lock();
        if !cached.seen.as_ref().is_some_and(|now| now.is(&seen)) {
            // In the meantime another thread has seen other values.
            return Ok(made.tensor);
        }
        if let Some(step) = recorded {
            let epoch = request.now.1;
            cached.recorded = Some(Recorded { step, epoch });
        }
        // A GPU does not tell; it makes the codes again in each step.
        if let Some(amax) = &made.amax
            && amax.device().is_cpu()
            && is_non_finite(amax)?
        {
            let observer = quantizer.observer.as_ref().filter(|o| o.record);
            let told = observer.map(|observer| Arc::downgrade(&observer.step));
            cached.bad = Some(Bad {
                amax: amax.clone(),
                told: told.unwrap_or_default(),
            });
        }
        let outdated = |entry: &Entry| {
            request.fits(entry)
                || same_cast(&entry.quantizer, quantizer) && entry.version.1 != request.now.1
        };
        cached.entries.retain(|entry| !outdated(entry));
        if cached.entries.len() == ENTRIES {
            cached.entries.remove(0);
        }
        cached.entries.push(Entry {
            quantizer: Quantizer {
                counter: None,
                observer: None,
                hook: None,
                recall: None,
                ..quantizer.clone()
            },
            contraction,
            both,
            trained: request.records() || matches!(step, Step::MakeKept(_)),
            version,
            settled,
            quant_scale: made.quant_scale,
            quantized: made.tensor.clone(),
            reuses: 0,
            packed: None,
        });
        drop(cached);
        match step {
            // Evaluation uses a scale of its own.
            Step::MakeKept(_) => {
                let again = self.quantize_as(weight, matrix, quantizer, contraction, both)?;
                Ok(again.0)
            }
            _ => Ok(made.tensor),
        }
    }
}

/// The same cast, without recording an amax for later scales.
fn without_record(quantizer: &Quantizer) -> Quantizer {
    let mut quantizer = quantizer.clone();
    if let Some(observer) = &mut quantizer.observer {
        observer.record = false;
    }
    quantizer
}

/// The same cast, with this scale in place of its slot's.
fn with_scale(quantizer: &Quantizer, quant_scale: &Tensor) -> Result<Quantizer> {
    let device = quant_scale.device();
    let slot = Slot::alone("kept", Role::Weight, 1, device)?;
    slot.restore(quant_scale, &Tensor::zeros(1, DType::F32, device)?)?;
    let source = ScaleSource::Delayed {
        slot,
        rule: DelayedRule::default(),
        first: FirstScale::One,
    };
    Ok(Quantizer {
        source,
        ..without_record(quantizer)
    })
}
