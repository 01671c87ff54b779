//! What a parameter in parts knows about its amax.

use candle_core::Tensor;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

#[derive(Debug, Default)]
pub(super) struct KnownAmax {
    /// Whether a cast of the parameter makes its scale from it.
    wanted: AtomicBool,
    /// The amax of the whole, and the stamp of this rank's range that it was made from.
    known: Mutex<Option<(Tensor, u64)>>,
}

impl KnownAmax {
    pub(super) fn want(&self) {
        self.wanted.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_wanted(&self) -> bool {
        self.wanted.load(Ordering::Relaxed)
    }

    pub(super) fn know(&self, amax: Tensor, stamp: u64) {
        *self.lock() = Some((amax, stamp));
    }

    pub(super) fn known(&self) -> Option<(Tensor, u64)> {
        self.lock().clone()
    }

    pub(super) fn forget(&self) {
        *self.lock() = None;
    }

    fn lock(&self) -> MutexGuard<'_, Option<(Tensor, u64)>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
