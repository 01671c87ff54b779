//! Casts that are done a second time, for a forward pass that is computed again.
//!
//! Nothing of a cast may differ the second time: neither its scale, although its step has ended and the table has others by
//! then, nor the bits of a stochastic rounding. And nothing must notice it: no amax, no count, no hook. So the first time
//! [`CastNotes`] keep what does not follow from the values alone: scales from a table, keys of stochastic roundings, and the
//! codes of weights, which a cache holds anyway.

use crate::base::error::Result;
use crate::cast::quantize::quantized::Quantized;
use crate::cast::tensor::Fp8Tensor;
use crate::cast::weight_version::Seen;
use candle_core::Tensor;
use fp8_core::{Cast, Rounding, StochasticKey};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// What has to be known of the casts of one [`Quantizer`](crate::Quantizer) to repeat them.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::{CastNotes, Quantizer, Recall, Role, ScaleSource, Slot};
/// use fp8_core::{Cast, Contraction, Format, Granularity};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let slot = Slot::alone("fc", Role::GradOutput, 1, &Device::Cpu)?;
/// let cast = Quantizer::new(Cast::new(Format::E5M2), Granularity::Tensorwise, ScaleSource::Unscaled)
///     .with_stochastic(slot, 17);
/// let x = Tensor::full(1.0625f32, 1000, &Device::Cpu)?;
/// let codes = |recall: Option<Recall>| -> Result<Vec<u8>, Box<dyn std::error::Error>> {
///     let cast = cast.clone().with_recall(recall);
///     Ok(cast.quantize(&x, Contraction::Cols)?.tensor.codes().to_vec1()?)
/// };
/// let notes = CastNotes::default();
/// let first = codes(Some(Recall::Note(notes.clone())))?;
/// assert_ne!(codes(None)?, first); // other random bits
/// assert_eq!(codes(Some(notes.repeated()))?, first);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Default)]
pub struct CastNotes(Arc<Notes>);

#[derive(Debug, Default)]
struct Notes {
    casts: Mutex<Vec<Noted>>,
    /// Of a weight, from its cache.
    codes: OnceLock<(Fp8Tensor, Seen)>,
}

/// One cast.
#[derive(Debug, Clone)]
pub(crate) struct Noted {
    pub(crate) key: Option<StochasticKey>,
    /// quant_scale and dequant_scale, where they come from a table.
    pub(crate) scales: Option<(Tensor, Tensor)>,
}

/// Whether the casts of a quantizer are to be repeated, or are repeated.
///
/// ```
/// use fp8_candle::{CastNotes, Quantizer, Recall};
/// use fp8_core::{Format, Granularity};
/// let cast = Quantizer::dynamic(Format::E4M3, Granularity::Tensorwise);
/// let cast = cast.with_recall(Recall::Note(CastNotes::default()));
/// assert!(matches!(cast.recall, Some(Recall::Note(_))));
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Recall {
    /// Casts as ever, and notes what a repetition needs.
    Note(CastNotes),
    /// Casts as noted, in the same order, unnoticed. What is cast after the last one noted is cast as ever.
    Repeat(Repetition),
}

/// Noted casts, and how many of them were repeated.
///
/// ```
/// use fp8_candle::{CastNotes, Recall, Repetition};
/// let of = |recall: Recall| -> Option<Repetition> {
///     match recall {
///         Recall::Repeat(repetition) => Some(repetition),
///         _ => None,
///     }
/// };
/// assert!(of(CastNotes::default().repeated()).is_some());
/// ```
#[derive(Debug, Clone)]
pub struct Repetition {
    notes: CastNotes,
    next: Arc<AtomicUsize>,
}

impl CastNotes {
    /// These casts once more, from the first one.
    pub fn repeated(&self) -> Recall {
        Recall::Repeat(Repetition {
            notes: self.clone(),
            next: Arc::new(AtomicUsize::new(0)),
        })
    }

    fn get(&self, index: usize) -> Option<Noted> {
        let casts = self.0.casts.lock().unwrap_or_else(PoisonError::into_inner);
        casts.get(index).cloned()
    }

    fn push(&self, noted: Noted) {
        let mut casts = self.0.casts.lock().unwrap_or_else(PoisonError::into_inner);
        casts.push(noted);
    }
}

impl Recall {
    /// The cast to repeat now, if there is one.
    pub(crate) fn next(&self) -> Option<Noted> {
        let Self::Repeat(repetition) = self else {
            return None;
        };
        let index = repetition.next.fetch_add(1, Ordering::Relaxed);
        repetition.notes.get(index)
    }

    /// The scales of the cast to repeat next.
    pub(crate) fn peek(&self) -> Option<Noted> {
        match self {
            Self::Note(_) => None,
            Self::Repeat(repetition) => {
                let index = repetition.next.load(Ordering::Relaxed);
                repetition.notes.get(index)
            }
        }
    }

    /// Notes a cast, with its scales where `from_table`.
    pub(crate) fn note(&self, quantized: &Quantized, from_table: bool) -> Result<()> {
        if let Self::Note(notes) = self {
            let scales = match from_table {
                false => None,
                // Not views, which would hold the columns of all rows.
                true => Some((
                    quantized.quant_scale.force_contiguous()?,
                    quantized.tensor.dequant_scale().force_contiguous()?,
                )),
            };
            notes.push(Noted {
                key: key_of(&quantized.cast),
                scales,
            });
        }
        Ok(())
    }

    /// Notes codes of a cached weight.
    pub(crate) fn note_codes(&self, codes: &Fp8Tensor, seen: &Seen) {
        if let Self::Note(notes) = self {
            // A cache that is asked twice for one cast gives the same codes.
            let _ = notes.0.codes.set((codes.clone(), seen.clone()));
        }
    }

    /// The noted codes of a cached weight, and the values that they were made from.
    pub(crate) fn codes(&self) -> Option<&(Fp8Tensor, Seen)> {
        match self {
            Self::Note(_) => None,
            Self::Repeat(repetition) => repetition.notes.0.codes.get(),
        }
    }
}

fn key_of(cast: &Cast) -> Option<StochasticKey> {
    match cast.rounding {
        Rounding::Stochastic(key) => Some(key),
        _ => None,
    }
}
