//! What this rank has communicated for sharded parameters.

use rapidhash::v3::rapidhash_v3;
use std::sync::atomic::{AtomicU64, Ordering};

/// A hash of the gathers and scatters so far. Ranks whose hash differs have gathered other parameters, or in another order, or cast them
/// with other scales. Tensors of the same size would be exchanged without any error, so their data would be wrong.
#[derive(Debug, Default)]
pub(super) struct Trace(AtomicU64);

/// What was done.
#[derive(Debug, Clone, Copy)]
#[repr(u8)]
pub(super) enum Did {
    Gather,
    GatherCodes,
    Scatter,
}

impl Trace {
    /// Adds what was done with parameter number `index`, by one thread at a time. `detail`: what else must agree.
    pub(super) fn note(&self, did: Did, index: usize, detail: u64) {
        let words = [self.get(), did as u64, index as u64, detail];
        let hash = rapidhash_v3(&words.map(u64::to_le_bytes).concat());
        self.0.store(hash, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
