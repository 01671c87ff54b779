//! Replay of recorded casts, for forward passes that are computed again.
//!
//! A replayed cast gives the same codes as the first time, although its step may have ended and the table may hold other
//! scales by then, and no observer is told of it. A recorded cast is therefore a cast with everything settled: the key of a
//! stochastic rounding, and scales that came from a table. Scales that follow from the values alone are not kept.

use crate::base::error::Result;
use crate::base::sync::lock;
use crate::cast::spec::{CastSpec, ScaleSource};
use crate::cast::tensor::{Fp8Tensor, Quantized};
use crate::cast::weight_version::Seen;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

/// A cast that can be done again to the bit.
#[derive(Debug, Clone)]
pub(crate) struct RecordedCast {
    /// Without a source of random bits: rounding has the key that was drawn.
    pub(crate) spec: CastSpec,
    pub(crate) source: ScaleSource,
}

impl RecordedCast {
    /// The cast that made `quantized`, with its scales.
    pub(crate) fn of(quantized: &Quantized) -> Result<Self> {
        Ok(Self {
            spec: CastSpec::new(quantized.cast, quantized.tensor.granularity()),
            // Not views, which would hold the columns of all rows.
            source: ScaleSource::Known {
                quant_scale: quantized.quant_scale.force_contiguous()?,
                dequant_scale: quantized.tensor.dequant_scale().force_contiguous()?,
            },
        })
    }
}

/// The casts of one [`Quantizer`](crate::Quantizer) in a run, to be replayed in another.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::{Quantizer, Recording, Replay, Role, ScaleSource, Slot};
/// use fp8_core::{Cast, Contraction, Format, Granularity};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let slot = Slot::alone("fc", Role::GradOutput, 1, &Device::Cpu)?;
/// let cast = Quantizer::new(Cast::new(Format::E5M2), Granularity::Tensorwise, ScaleSource::Unscaled)
///     .with_stochastic(slot, 17);
/// let x = Tensor::full(1.0625f32, 1000, &Device::Cpu)?;
/// let codes = |replay: Option<Replay>| -> Result<Vec<u8>, Box<dyn std::error::Error>> {
///     let cast = cast.clone().with_replay(replay);
///     Ok(cast.quantize(&x, Contraction::Cols)?.tensor.codes().to_vec1()?)
/// };
/// let recording = Recording::default();
/// let first = codes(Some(recording.recorder()))?;
/// assert_ne!(codes(None)?, first); // other random bits
/// assert_eq!(codes(Some(recording.player()))?, first);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct Recording(Arc<Recorded>);

#[derive(Debug, Default)]
struct Recorded {
    casts: Mutex<Vec<RecordedCast>>,
    /// The codes of a weight, from its cache.
    codes: OnceLock<(Fp8Tensor, Seen)>,
}

/// Whether a [`Quantizer`](crate::Quantizer) adds its casts to a [`Recording`] or replays them.
#[derive(Debug, Clone)]
pub struct Replay {
    recording: Recording,
    /// How many casts were replayed; None while recording.
    played: Option<Arc<AtomicUsize>>,
}

impl Recording {
    /// Adds casts to this recording.
    pub fn recorder(&self) -> Replay {
        Replay {
            recording: self.clone(),
            played: None,
        }
    }

    /// Replays these casts in their order, from the first one, without telling observers. Casts after the last recorded one are
    /// ordinary casts.
    pub fn player(&self) -> Replay {
        Replay {
            recording: self.clone(),
            played: Some(Arc::default()),
        }
    }

    fn get(&self, index: usize) -> Option<RecordedCast> {
        let casts = lock(&self.0.casts);
        casts.get(index).cloned()
    }
}

impl Replay {
    /// The cast to replay now, if there is one.
    pub(crate) fn next(&self) -> Option<RecordedCast> {
        let index = self.played.as_ref()?.fetch_add(1, Ordering::Relaxed);
        self.recording.get(index)
    }

    /// The cast that [`Replay::next`] will give.
    pub(crate) fn peek(&self) -> Option<RecordedCast> {
        let index = self.played.as_ref()?.load(Ordering::Relaxed);
        self.recording.get(index)
    }

    /// Records a cast by `spec` with scales from `source`, unless this replays.
    pub(crate) fn record(
        &self,
        spec: &CastSpec,
        source: &ScaleSource,
        quantized: &Quantized,
    ) -> Result<()> {
        if self.played.is_some() {
            return Ok(());
        }
        let cast = match source.slot() {
            Some(_) => RecordedCast::of(quantized)?,
            None => RecordedCast {
                spec: CastSpec {
                    cast: quantized.cast,
                    stochastic: None,
                    ..spec.clone()
                },
                source: source.clone(),
            },
        };
        let recorded = &self.recording.0;
        let mut casts = lock(&recorded.casts);
        casts.push(cast);
        Ok(())
    }

    /// Records codes of a cached weight, unless this replays.
    pub(crate) fn record_codes(&self, codes: &Fp8Tensor, seen: &Seen) {
        if self.played.is_none() {
            // A cache that is asked twice for one cast gives the same codes.
            let _ = self.recording.0.codes.set((codes.clone(), seen.clone()));
        }
    }

    pub(crate) fn is_playing(&self) -> bool {
        self.played.is_some()
    }

    /// The recorded codes of a cached weight, and the values that they were made from.
    pub(crate) fn codes(&self) -> Option<&(Fp8Tensor, Seen)> {
        self.recording.0.codes.get()
    }
}
