//! The loop of training.

use super::error::{Error, Result};
use super::learner::{Learner, StepRecord};
use super::metrics::Metrics;
use super::progress::{Events, Progress, Stop};

/// Steps between two readings of losses, where reading waits for a device.
const READ_EVERY: u64 = 10;

/// How long [`train`] trains, and what it does in between.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TurnOptions {
    /// The last step.
    pub steps: u64,
    /// Steps between two validations; None for none before the last step.
    pub validate_every: Option<u64>,
    /// Steps between two checkpoints; None for none before the last step.
    pub checkpoint_every: Option<u64>,
}

impl TurnOptions {
    /// Ten validations, and a checkpoint every hundred steps.
    pub fn new(steps: u64) -> Self {
        Self {
            steps,
            validate_every: Some((steps / 10).max(1)),
            checkpoint_every: Some(100),
        }
    }

    /// Sets the number of steps between two checkpoints.
    pub fn with_checkpoint_every(mut self, steps: Option<u64>) -> Self {
        self.checkpoint_every = steps;
        self
    }

    /// Sets the number of steps between two validations.
    pub fn with_validate_every(mut self, steps: Option<u64>) -> Self {
        self.validate_every = steps;
        self
    }

    fn check(&self) -> Result<()> {
        let zero = |key, value| match value {
            Some(0) => Err(Error::Setting {
                key,
                value: "0".into(),
                expected: "at least 1",
            }),
            _ => Ok(()),
        };
        zero("steps", Some(self.steps))?;
        zero("validate_every", self.validate_every)?;
        zero("checkpoint_every", self.checkpoint_every)
    }
}

/// How [`train`] ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// After the last step.
    Finished,
    /// At a [`Stop`].
    Stopped,
}

/// Trains every learner up to the last step. They take turns step by step, so that their times can be compared. After a kill between two
/// checkpoints, learners that are behind catch up first. Each step goes to `metrics`. The last checkpoint, of the last step or of the step at which it was
/// stopped, is written too.
///
/// # Errors
/// The first error of a learner, [`Error::Setting`] for a number of steps that is 0, and errors of writing metrics.
pub fn train<L: Learner>(
    learners: &mut [L],
    options: &TurnOptions,
    metrics: &mut Metrics,
    events: &mut dyn Events,
    stop: &Stop,
) -> Result<Ended, L::Error> {
    options.check()?;
    let every = |n: Option<u64>, step: u64| n.is_some_and(|n| step.is_multiple_of(n));
    while let Some(step) = least_step(learners).filter(|&step| step < options.steps) {
        if stop.is_requested() {
            finish(learners, metrics)?;
            return Ok(Ended::Stopped);
        }
        for learner in learners.iter_mut().filter(|l| l.step() == step) {
            learner.train_step()?;
            let step = learner.step();
            let stats = learner.take_stats();
            let validates = every(options.validate_every, step) && step < options.steps;
            let saves = every(options.checkpoint_every, step) && step < options.steps;
            let reads = validates || saves || step.is_multiple_of(READ_EVERY);
            let last = match reads || !learner.reading_waits() {
                true => read(learner, metrics)?,
                false => None,
            };
            let validation = match validates {
                true => learner.validate()?,
                false => None,
            };
            let progress = Progress {
                name: learner.name(),
                step,
                steps: options.steps,
                last: last.as_ref(),
                mean_loss: match validates {
                    true => metrics.mean_train_loss(learner.name()),
                    false => None,
                },
                accuracy: learner.accuracy(),
            };
            events.stepped(&progress);
            if let Some(stats) = &stats {
                events.measured(&progress, stats);
            }
            if let Some(val_loss) = validation {
                metrics.push_validation(learner.name(), step, val_loss, learner.accuracy())?;
                events.validated(&progress, val_loss);
            }
            if saves {
                learner.save()?;
            }
        }
    }
    finish(learners, metrics)?;
    Ok(Ended::Finished)
}

fn least_step<L: Learner>(learners: &[L]) -> Option<u64> {
    learners.iter().map(L::step).min()
}

/// Reads and writes the outstanding steps, and returns the last of them.
fn read<L: Learner>(
    learner: &mut L,
    metrics: &mut Metrics,
) -> Result<Option<StepRecord>, L::Error> {
    let mut last = None;
    loop {
        // A learner that fails first reports the steps before.
        let records = learner.read_steps()?;
        for record in &records {
            metrics.push_step(learner.name(), record)?;
        }
        match records.into_iter().next_back() {
            Some(record) => last = Some(record),
            None => return Ok(last),
        }
    }
}

fn finish<L: Learner>(learners: &mut [L], metrics: &mut Metrics) -> Result<(), L::Error> {
    for learner in learners {
        read(learner, metrics)?;
        learner.save()?;
    }
    Ok(())
}
