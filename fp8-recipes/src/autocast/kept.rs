//! What the nodes of a step keep in FP8, and the warning if a recipe asks for that in vain.

use super::settings::{Mode, Settings};
use crate::warning::warn;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts what the nodes of a step keep in FP8.
#[derive(Debug, Default)]
pub(super) struct KeptBytes {
    bytes: AtomicU64,
    /// Whether a layer has trained under a recipe that asks for it.
    wanted: AtomicBool,
    /// Whether a node has done it.
    done: AtomicBool,
}

impl KeptBytes {
    /// Records the use of a layer.
    pub(super) fn note_use(&self, settings: &Settings) {
        let asks = settings.config.kept_activations.group_size().is_some();
        if asks && settings.mode == Mode::Fp8 && settings.training {
            self.wanted.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn note(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        self.done.store(true, Ordering::Relaxed);
    }

    /// The bytes kept since the last step; warns if no node has kept any although a recipe asks for it.
    pub(super) fn take(&self) -> u64 {
        let done = self.done.swap(false, Ordering::Relaxed);
        if self.wanted.swap(false, Ordering::Relaxed) && !done {
            warn_of_no_node();
        }
        self.bytes.swap(0, Ordering::Relaxed)
    }
}

/// Warns once per process.
fn warn_of_no_node() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if WARNED.swap(true, Ordering::Relaxed) {
        return;
    }
    warn(
        "kept_activations has no effect: under this recipe no transformer module was one node of the graph, and candle's graph keeps the \
         tensors of layers called one by one. It needs nn::TransformerLayer, MultiheadAttention, LayerNormMlp or LayerNormLinear \
         with a single node, under the recipe of the guard (not of a layer alone)",
    );
}
