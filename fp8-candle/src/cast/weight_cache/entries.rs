//! What a cache holds for one weight, and when its codes are still valid.

use crate::cast::packed::PackedWeight;
use crate::cast::quantizer::Quantizer;
use crate::cast::spec::{CastSpec, ScaleSource};
use crate::cast::state::{Slot, StepCells};
use crate::cast::tensor::Fp8Tensor;
use crate::cast::weight_version::Seen;
use candle_core::Tensor;
use fp8_core::Contraction;
use std::sync::{Arc, Weak};

#[derive(Debug, Default)]
pub(super) struct Cached {
    /// The values that the entries were made from.
    pub(super) seen: Option<Seen>,
    /// The step that has last trained with the weight.
    pub(super) step: Weak<StepCells>,
    /// Whether the amax of these values was recorded.
    pub(super) recorded: Option<Recorded>,
    /// The most recently used one is the last.
    pub(super) entries: Vec<Entry>,
    pub(super) kept: Option<Kept>,
    /// Set where the values hold Inf or NaN.
    pub(super) bad: Option<Bad>,
}

/// A weight with Inf or NaN. Its codes hide that from steps that reuse them, so each such step is told once,
/// and again when what it has seen was judged in between: a retry in the same step meets the same values.
#[derive(Debug)]
pub(super) struct Bad {
    pub(super) amax: Tensor,
    /// The last step that was told, and how often it had been judged then.
    pub(super) told: (Weak<StepCells>, u64),
}

/// When the amax of the weight was recorded.
#[derive(Debug, Clone)]
pub(super) struct Recorded {
    /// `None`: before the state was loaded.
    pub(super) step: Option<Arc<StepCells>>,
    /// The epoch of the slot: a scale set from outside starts a new one.
    pub(super) epoch: u64,
}

impl Recorded {
    pub(super) fn holds(&self, epoch: u64) -> bool {
        self.epoch == epoch && !self.step.as_ref().is_some_and(|step| step.is_aborted())
    }
}

/// The scale of codes to be made later, see [`WeightCache::restore`](super::WeightCache::restore).
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) seen: Seen,
    pub(super) quant_scale: Tensor,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) spec: CastSpec,
    pub(super) source: ScaleSource,
    pub(super) contraction: Contraction,
    /// Whether the codes were made for GEMMs over both dimensions.
    pub(super) both: bool,
    /// Whether a training cast made them.
    pub(super) trained: bool,
    /// Version of the slot when the codes were made.
    pub(super) version: (u64, u64),
    /// Whether the slot's scale was made by the rule of `source`.
    pub(super) settled: bool,
    pub(super) quant_scale: Tensor,
    pub(super) quantized: Fp8Tensor,
    /// How often the codes have been reused.
    pub(super) reuses: u32,
    /// The codes again, packed for the device.
    pub(super) packed: Option<PackedWeight>,
}

impl Entry {
    /// Whether the codes stay, although the slot may have another scale by now.
    pub(super) fn is_settled(&self, source: &ScaleSource) -> bool {
        let same_rule = match (&self.source, source) {
            (ScaleSource::Delayed { rule: a, .. }, ScaleSource::Delayed { rule: b, .. }) => a == b,
            _ => true,
        };
        self.version.0 > 0 && self.settled && same_rule
    }
}

/// How to get the codes.
pub(super) enum Step {
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
pub(super) struct Request<'a> {
    pub(super) quantizer: &'a Quantizer,
    pub(super) contraction: Contraction,
    pub(super) both: bool,
    /// Current version of the slot.
    pub(super) now: (u64, u64),
}

impl Request<'_> {
    pub(super) fn is_delayed(&self) -> bool {
        self.quantizer.source.is_delayed()
    }

    pub(super) fn records(&self) -> bool {
        self.is_delayed() && self.quantizer.observers.training_recorder().is_some()
    }

    /// Whether `entry` was made by this cast, perhaps with an earlier scale.
    pub(super) fn is_same_cast(&self, entry: &Entry) -> bool {
        entry.spec == self.quantizer.spec && entry.source == self.quantizer.source
    }

    pub(super) fn fits(&self, entry: &Entry) -> bool {
        let same_first = match (&self.quantizer.source, &entry.source) {
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
            && self.is_same_cast(entry)
    }
}

impl Cached {
    pub(super) fn decide(&mut self, seen: &Seen, request: &Request<'_>) -> Step {
        let unchanged = self.seen.as_ref() == Some(seen);
        if !unchanged && let Some(step) = self.step.upgrade() {
            // Noted here, since afterwards nothing shows it: an evaluation replaces what was seen.
            step.note_step();
        }
        if let Some(recorder) = request.quantizer.observers.training_recorder() {
            let step = Arc::downgrade(&recorder.step);
            if !unchanged && self.step.ptr_eq(&step) {
                recorder.step.note_changed_weight();
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
            && slot.is_made_for(request.quantizer.spec.cast.format)
            && let Some(kept) = self.kept.take()
            && kept.seen.has_values_of(seen)
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
    pub(super) fn delayed_entry(&self) -> Option<(&Entry, &Slot)> {
        let mut trained = self.entries.iter().rev().filter(|entry| entry.trained);
        trained.find_map(|entry| match &entry.source {
            ScaleSource::Delayed { slot, .. } => Some((entry, slot)),
            _ => None,
        })
    }
}
