//! Who is told of a cast: a counter, a recorder of amaxes, a hook.

use crate::base::error::Result;
use crate::cast::quantized::Quantized;
use crate::cast::state::AmaxRecorder;
use candle_core::Tensor;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Counts the tensors that were cast; a cached weight is not cast again.
pub type CastCounter = Arc<AtomicU64>;

/// Sees every cast of a [`Quantizer`](crate::Quantizer), for statistics.
pub trait CastHook: std::fmt::Debug + Send + Sync {
    /// `x` in high precision was cast to `quantized`, in a forward or a backward pass, on any thread.
    ///
    /// # Errors
    /// An error fails the pass.
    fn on_cast(&self, x: &Tensor, quantized: &Quantized) -> Result<()>;
}

/// Who is told of the casts of a [`Quantizer`](crate::Quantizer). Replayed casts are not told to anyone.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Observers {
    /// Incremented by every cast.
    pub counter: Option<CastCounter>,
    /// Records amaxes.
    pub recorder: Option<AmaxRecorder>,
    /// Sees every cast.
    pub hook: Option<Arc<dyn CastHook>>,
}

impl Observers {
    pub(crate) fn is_empty(&self) -> bool {
        self.counter.is_none() && self.recorder.is_none() && self.hook.is_none()
    }

    /// The recorder, if it records amaxes for delayed scales.
    pub(crate) fn training_recorder(&self) -> Option<&AmaxRecorder> {
        self.recorder.as_ref().filter(|recorder| recorder.record)
    }

    /// Counts a cast and records its amax. `makes_scales`: delayed scales are made from it.
    pub(crate) fn count_and_record(&self, amax: Option<&Tensor>, makes_scales: bool) -> Result<()> {
        if let Some(counter) = &self.counter {
            counter.fetch_add(1, Ordering::Relaxed);
        }
        match &self.recorder {
            Some(recorder) => recorder.note(amax, makes_scales),
            None => Ok(()),
        }
    }
}
