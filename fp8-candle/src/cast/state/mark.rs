//! A table's record of its latest training steps.

use crate::base::data::columns::Recorded;
use crate::base::error::Result;
use candle_core::Tensor;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// A step that may not have been committed yet.
pub(super) trait OpenStep: std::fmt::Debug + Send + Sync {
    /// Whether it is neither committed nor aborted.
    fn is_open(&self) -> bool;

    /// What its casts have recorded so far.
    fn recorded(&self) -> Result<Recorded>;
}

/// One training step of a table, from the first use of the model to the first use in the next step: its backward pass usually comes
/// after its guard has closed.
#[derive(Debug, Default)]
pub struct StepMark {
    /// A backward pass has reached one of its layers.
    pub(super) backward: AtomicBool,
    /// A cast on the CPU has seen Inf or NaN.
    pub(super) bad: AtomicBool,
    /// A change of one of the model's parameters was announced or noticed, or a loss scaler has skipped the step.
    pub(super) stepped: AtomicBool,
    /// How often a reader has judged what its casts have seen.
    looks: AtomicU64,
    /// The counts of the table when the next step began.
    pub(super) ended: OnceLock<Tensor>,
}

impl StepMark {
    pub(super) fn note_backward(&self) {
        self.backward.store(true, Ordering::Relaxed);
    }

    /// Notes that a reader has judged what the step has seen until now.
    pub(super) fn note_look(&self) {
        self.looks.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }

    pub(super) fn has_backward(&self) -> bool {
        self.backward.load(Ordering::Relaxed)
    }
}

/// The latest step of a table, and those before it whose backward pass may still come.
#[derive(Debug, Default)]
pub(super) struct Window {
    /// The counts when it began; None for zeros.
    pub(super) began: Option<Tensor>,
    pub(super) mark: Arc<StepMark>,
    pub(super) open: Vec<Weak<dyn OpenStep>>,
    /// What forward passes saw whose backward pass was still missing when the next step began.
    pub(super) pending: Vec<(Tensor, Arc<StepMark>)>,
    /// By row: when a cast first saw Inf or NaN in the latest step in which one did.
    pub(super) times: Vec<u64>,
    /// The first row in which Inf or NaN was seen since the last step without, and in which step.
    pub(super) culprit: Option<(usize, Weak<StepMark>)>,
}
