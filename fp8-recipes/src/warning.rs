//! Warnings for programs with and without a log, and one that several kinds of checkpoints give.

use crate::optim::{OptimizerState, ResumableOptimizer};
use std::path::Path;

/// Says `text` by `tracing`, or on stderr as `warning: ..` if the process has set no subscriber, so that whoever runs the program sees it.
pub fn warn(text: &str) {
    match tracing::dispatcher::has_been_set() {
        true => tracing::warn!("{text}"),
        false => eprintln!("warning: {text}"),
    }
}

/// Warns if the checkpoint at `path` has a loss scaler, which `optimizer` does not restore.
pub(crate) fn warn_of_lost_scaler<O: ResumableOptimizer + ?Sized>(
    path: &Path,
    state: &OptimizerState,
    optimizer: &O,
) {
    if state.loss_scaler().is_some() && !optimizer.scales_loss() {
        tracing::warn!(
            "{}: the checkpoint has a loss scaler, this run has none",
            path.display()
        );
    }
}
