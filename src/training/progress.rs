//! How a run reports its progress, and how it is asked to stop.

use super::learner::StepRecord;
use crate::StatsReport;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// A request to stop after the current step, shared between a run and its caller, such as a handler of Ctrl-C.
///
/// ```
/// use fp8::training::Stop;
/// let stop = Stop::default();
/// let handler = stop.clone();
/// assert!(!handler.request());
/// assert!(stop.is_requested());
/// assert!(handler.request(), "the second time");
/// ```
#[derive(Debug, Clone, Default)]
pub struct Stop(Arc<AtomicBool>);

impl Stop {
    /// Asks the run to stop; true if that was asked before.
    pub fn request(&self) -> bool {
        self.0.swap(true, Ordering::SeqCst)
    }

    /// Whether the run should stop.
    pub fn is_requested(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// Where a run stands.
#[derive(Debug)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// The run.
    pub name: &'a str,
    /// Its finished steps.
    pub step: u64,
    /// All of its steps.
    pub steps: u64,
    /// The results of the last step that was read.
    pub last: Option<&'a StepRecord>,
    /// The mean training loss of the steps since the last validation, at a validation.
    pub mean_loss: Option<f64>,
    /// The share of targets that the last validation found predicted correctly, if that is counted.
    pub accuracy: Option<f64>,
}

/// Receives the events of a run. Every method does nothing by default.
pub trait Events {
    /// A step has ended.
    fn stepped(&mut self, progress: &Progress<'_>) {
        let _ = progress;
    }

    /// A validation has ended.
    fn validated(&mut self, progress: &Progress<'_>, val_loss: f64) {
        let _ = (progress, val_loss);
    }

    /// The casts of a step were measured.
    fn measured(&mut self, progress: &Progress<'_>, stats: &StatsReport) {
        let _ = (progress, stats);
    }
}

/// Ignores all events.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Events for Silent {}
