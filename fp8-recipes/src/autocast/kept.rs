//! What the nodes of a step keep in FP8, and the warning if a recipe asks for that in vain.

use super::settings::{Mode, Settings};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Counts what the nodes of a step keep in FP8.
#[derive(Debug, Default)]
pub(super) struct KeptBytes {
    bytes: AtomicU64,
    /// A layer has trained under a recipe that asks for it.
    wanted: AtomicBool,
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
    }

    /// What was kept since the last step; warns if something should have been.
    pub(super) fn take(&self) -> u64 {
        let bytes = self.bytes.swap(0, Ordering::Relaxed);
        if self.wanted.swap(false, Ordering::Relaxed) && bytes == 0 {
            warn();
        }
        bytes
    }
}

/// Warns once per process: by `tracing`, or on stderr if no subscriber is set.
fn warn() {
    static WARNED: AtomicBool = AtomicBool::new(false);
    if WARNED.swap(true, Ordering::Relaxed) {
        return;
    }
    let text = "kept_activations has no effect: under this recipe no transformer module was one node of the graph, and candle's graph keeps the \
                tensors of layers called one by one. It needs nn::TransformerLayer, MultiheadAttention, LayerNormMlp or LayerNormLinear \
                with a single node, under the recipe of the guard (not of a layer alone)";
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => eprintln!("warning: {text}"),
    }
}
