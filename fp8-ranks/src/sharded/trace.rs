//! What this rank has communicated for sharded parameters.

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
        let mut hash = self.0.load(Ordering::Relaxed);
        for part in [did as u64, index as u64, detail] {
            // FNV-1a over words, mixed because its low bits see only low bits.
            hash = (hash ^ part).wrapping_mul(0x0100_0000_01b3);
            hash ^= hash >> 29;
        }
        self.0.store(hash, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
