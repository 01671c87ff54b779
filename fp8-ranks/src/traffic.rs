//! Counters: how often each operation was called, and how many bytes this rank sent to others.

use crate::engine::Collective;
use crate::error::Operation;
use candle_core::Tensor;
use std::sync::atomic::{AtomicU64, Ordering};

/// What one operation has cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sent {
    /// Calls of the user.
    pub calls: u64,
    /// Bytes of data from this rank to others.
    pub bytes: u64,
}

/// What a group has sent since it was made or since [`crate::ProcessGroup::reset_traffic`].
///
/// Bytes are those of the data that this rank has for others, with N ranks and B bytes of its tensor:
///
/// | operation | bytes |
/// |---|---|
/// | `all_gather` | (N - 1) B: its rows, to each of the others |
/// | `all_to_all` | what it has for others: B without its own rows |
/// | `reduce_scatter` | the rows of others: about (N - 1)/N of B |
/// | `all_reduce` in rank order | a reduce_scatter and an all_gather of the result: about 2 (N - 1)/N of B |
/// | `all_reduce` with [`crate::SumOrder::Engine`] or of f32 maxima, `all_reduce_max` | 2 (N - 1)/N of B, as a ring of ranks sends; the engine may do something else |
/// | `broadcast` | (N - 1) B on the root, 0 elsewhere, whatever tree the engine sends it along |
/// | `barrier` | 0 |
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    kinds: [Sent; Operation::ALL.len()],
}

impl Traffic {
    /// What one operation has cost.
    pub fn of(&self, operation: Operation) -> Sent {
        place(operation).map_or_else(Sent::default, |place| self.kinds[place])
    }

    /// All operations that were called.
    pub fn iter(&self) -> impl Iterator<Item = (Operation, Sent)> + '_ {
        let all = Operation::ALL.into_iter().zip(self.kinds);
        all.filter(|(_, sent)| sent.calls > 0)
    }

    /// The sum over operations.
    pub fn total(&self) -> Sent {
        self.kinds.iter().fold(Sent::default(), |sum, kind| Sent {
            calls: sum.calls + kind.calls,
            bytes: sum.bytes + kind.bytes,
        })
    }
}

fn place(operation: Operation) -> Option<usize> {
    Operation::ALL.iter().position(|one| *one == operation)
}

/// The counters of a group, which its clones share.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    kinds: [(AtomicU64, AtomicU64); Operation::ALL.len()],
}

impl Counters {
    pub(crate) fn call(&self, operation: Operation) {
        if let Some(place) = place(operation) {
            self.kinds[place].0.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub(crate) fn bytes(&self, operation: Operation, bytes: u64) {
        if let Some(place) = place(operation) {
            self.kinds[place].1.fetch_add(bytes, Ordering::Relaxed);
        }
    }

    pub(crate) fn read(&self) -> Traffic {
        let kinds = std::array::from_fn(|place| Sent {
            calls: self.kinds[place].0.load(Ordering::Relaxed),
            bytes: self.kinds[place].1.load(Ordering::Relaxed),
        });
        Traffic { kinds }
    }

    pub(crate) fn reset(&self) {
        for (calls, bytes) in &self.kinds {
            calls.store(0, Ordering::Relaxed);
            bytes.store(0, Ordering::Relaxed);
        }
    }
}

/// The table of [`Traffic`], for one collective of the engine.
pub(crate) fn sent(collective: &Collective, rank: usize, ranks: usize) -> u64 {
    let others = ranks as u64 - 1;
    let size = |tensor: &Tensor| tensor.dtype().size_in_bytes() as u64;
    let bytes = |tensor: &Tensor| tensor.elem_count() as u64 * size(tensor);
    match collective {
        Collective::AllGather { own, .. } => bytes(own) * others,
        Collective::AllToAll { pieces, send, .. } => {
            bytes(pieces) - send[rank] as u64 * size(pieces)
        }
        Collective::Broadcast { tensor, root } if *root == rank => bytes(tensor) * others,
        Collective::MaxOfBits { own } | Collective::EngineSum { own } => {
            (2 * others * bytes(own)).div_ceil(ranks as u64)
        }
        Collective::Broadcast { .. } | Collective::Barrier => 0,
    }
}
