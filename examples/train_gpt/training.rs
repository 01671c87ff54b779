//! Trains several runs side by side, in the loop of the library.

use crate::data::{Batch, Data};
use crate::ranks::Ranks;
use crate::record::STATS;
use crate::requests::Request;
use crate::run::Run;
use crate::settings::Settings;
use crate::watch::{Look, Watch};
use anyhow::{Error, Result, bail};
use fp8::StatsReport;
use fp8::training::{Ended, Learner, Metrics, StepRecord, TurnOptions, train};
use std::path::Path;

/// Batches of a validation during training.
const VALIDATION_BATCHES: usize = 4;

/// A run with the data that it learns and the folder of its checkpoints.
struct Pupil<'a> {
    run: &'a mut Run,
    data: &'a Data,
    validation: &'a [Batch],
    dir: &'a Path,
    /// Whether this rank validates: ranks with parts of the parameters compute together.
    validates: bool,
}

impl Learner for Pupil<'_> {
    type Error = Error;

    fn name(&self) -> &str {
        &self.run.name
    }

    fn step(&self) -> u64 {
        self.run.step
    }

    fn train_step(&mut self) -> Result<()> {
        self.run.train_step(self.data)
    }

    fn read_steps(&mut self) -> Result<Vec<StepRecord>> {
        self.run.read_steps()
    }

    fn reading_waits(&self) -> bool {
        self.run.is_asynchronous()
    }

    fn validate(&mut self) -> Result<Option<f64>> {
        match self.validates {
            true => self.run.validate(self.validation).map(Some),
            false => Ok(None),
        }
    }

    fn save(&mut self) -> Result<()> {
        self.run.save(self.dir)
    }

    fn take_stats(&mut self) -> Option<StatsReport> {
        self.run.take_stats()
    }
}

/// Trains every run to the end, or until the system asks to stop: that request.
pub fn train_side_by_side(
    runs: &mut [Run],
    settings: &Settings,
    data: &Data,
    metrics: &mut Metrics,
    dir: &Path,
    checkpoint_every: u64,
    ranks: &Ranks,
) -> Result<Option<Request>> {
    let (batch, context) = (settings.batch, settings.model.context);
    let validation = data.validation_batches(VALIDATION_BATCHES, batch, context)?;
    let done = runs.iter().map(|run| run.step).sum();
    let judged = |loss: f64, _: Option<f64>| format!("{loss:.4}");
    let mut watch = Watch::new(Look {
        steps: settings.steps * runs.len() as u64,
        done,
        leads: ranks.leads(),
        alone: !ranks.is_parallel(),
        named: true,
        stats: dir.join(STATS),
        judged: &judged,
        note: String::new,
    })?;
    let (stop, requests) = (watch.stop(), watch.requests());
    let validates = ranks.leads() || ranks.is_sharded();
    let mut pupils: Vec<Pupil<'_>> = runs
        .iter_mut()
        .map(|run| Pupil {
            run,
            data,
            validation: &validation,
            dir,
            validates,
        })
        .collect();
    let options = TurnOptions::new(settings.steps).with_checkpoint_every(Some(checkpoint_every));
    let ended = train(&mut pupils, &options, metrics, &mut watch, &stop);
    let shown = watch.end();
    let ended = ended?;
    shown?;
    match (ended, requests.get()) {
        (Ended::Finished, _) => Ok(None),
        (Ended::Stopped, Some(request)) => Ok(Some(*request)),
        (Ended::Stopped, None) => bail!("stopped"),
    }
}
