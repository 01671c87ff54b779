//! The interface of what the loop drives.

use super::error::Error;
use crate::StatsReport;

/// A model in training. [`Trainer`](super::Trainer) is one; implement it to train something else in the same loop, such as parameters in
/// parts on several ranks.
pub trait Learner {
    /// The error of its operations.
    type Error: From<Error>;

    /// Its name in metrics and messages.
    fn name(&self) -> &str;

    /// Finished steps.
    fn step(&self) -> u64;

    /// Makes one optimizer step. Its results may stay on the device until [`Learner::read_steps`].
    ///
    /// # Errors
    /// If the step fails; the number of finished steps is then unchanged.
    fn train_step(&mut self) -> Result<(), Self::Error>;

    /// Results of steps since the last call. The loop calls this until it returns none.
    ///
    /// # Errors
    /// If a loss is not finite, once the steps before have been returned, or the device fails.
    fn read_steps(&mut self) -> Result<Vec<StepRecord>, Self::Error>;

    /// Whether reading waits for a device, so that the loop reads rarely. No by default.
    fn reading_waits(&self) -> bool {
        false
    }

    /// The mean loss over held-out data; None if there is none, or if another rank computes it.
    ///
    /// # Errors
    /// If the model fails.
    fn validate(&mut self) -> Result<Option<f64>, Self::Error>;

    /// The share of targets that the last validation found predicted correctly; None, the default, if that is not counted.
    fn accuracy(&self) -> Option<f64> {
        None
    }

    /// Writes a checkpoint.
    ///
    /// # Errors
    /// If it cannot be written; the previous one then still exists.
    fn save(&mut self) -> Result<(), Self::Error>;

    /// Statistics of the casts of the last step, if it was measured. None by default.
    fn take_stats(&mut self) -> Option<StatsReport> {
        None
    }
}

/// The results of a step.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct StepRecord {
    /// The step's number, from 1.
    pub step: u64,
    /// The mean loss of its batch.
    pub loss: f64,
    /// The learning rate.
    pub lr: f64,
    /// The norm of the gradients; Inf or NaN if the optimizer has skipped the step because of them; None if it is not known.
    pub grad_norm: Option<f64>,
    /// Its duration in milliseconds.
    pub ms: f64,
    /// Tokens of its batch.
    pub tokens: usize,
}

impl StepRecord {
    /// The results of a step of which only the loss is known.
    pub fn new(step: u64, loss: f64) -> Self {
        Self {
            step,
            loss,
            lr: f64::NAN,
            grad_norm: None,
            ms: f64::NAN,
            tokens: 0,
        }
    }
}
