//! Trains several runs side by side, in the loop of the library.

use crate::data::{Batch, Data};
use crate::ranks::Ranks;
use crate::record::STATS;
use crate::run::Run;
use crate::settings::Settings;
use anyhow::{Error, Result};
use fp8::StatsReport;
use fp8::training::{
    Ended, Events, Learner, Metrics, Progress, StepRecord, Stop, TurnOptions, append_stats, train,
};
use indicatif::{ProgressBar, ProgressStyle};
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

/// Trains every run to the end. Returns false after Ctrl-C.
pub fn train_side_by_side(
    runs: &mut [Run],
    settings: &Settings,
    data: &Data,
    metrics: &mut Metrics,
    dir: &Path,
    checkpoint_every: u64,
    ranks: &Ranks,
) -> Result<bool> {
    let stop = Stop::default();
    let asked = stop.clone();
    ctrlc::set_handler(move || {
        if asked.request() {
            // A second Ctrl-C ends the program at once; files are replaced atomically, so none is left half-written.
            std::process::exit(130);
        }
    })?;
    let (batch, context) = (settings.batch, settings.model.context);
    let validation = data.validation_batches(VALIDATION_BATCHES, batch, context)?;
    let done = runs.iter().map(|run| run.step).sum();
    let mut watch = Watch::new(
        settings.steps * runs.len() as u64,
        done,
        dir,
        ranks.leads(),
        &stop,
    )?;
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
    watch.bar.finish_and_clear();
    let ended = ended?;
    watch.failed?;
    Ok(ended == Ended::Finished)
}

/// Shows the runs: a bar for all of them, and lines on the rank that leads.
struct Watch<'a> {
    bar: ProgressBar,
    dir: &'a Path,
    leads: bool,
    /// The first error of writing statistics, which ends the run.
    failed: Result<()>,
    stop: Stop,
}

impl<'a> Watch<'a> {
    fn new(steps: u64, done: u64, dir: &'a Path, leads: bool, stop: &Stop) -> Result<Self> {
        let bar = match leads {
            true => ProgressBar::new(steps),
            false => ProgressBar::hidden(),
        };
        let bar = bar.with_style(ProgressStyle::with_template(
            "{bar:30} step {msg} [{elapsed}, {eta} left]",
        )?);
        bar.set_position(done);
        bar.reset_eta();
        Ok(Self {
            bar,
            dir,
            leads,
            failed: Ok(()),
            stop: stop.clone(),
        })
    }

    /// Prints a line above the bar.
    fn say(&self, text: &str) {
        match self.bar.is_hidden() {
            true => println!("{text}"),
            false => self.bar.println(text),
        }
    }
}

impl Events for Watch<'_> {
    fn stepped(&mut self, progress: &Progress<'_>) {
        self.bar.inc(1);
        if let Some(last) = progress.last {
            self.bar.set_message(format!(
                "{}/{} {}: loss {:.3}, {:.0} tokens/s",
                progress.step,
                progress.steps,
                progress.name,
                last.loss,
                last.tokens as f64 / last.ms * 1e3
            ));
        }
    }

    fn validated(&mut self, progress: &Progress<'_>, val_loss: f64) {
        if let (true, Some(last)) = (self.leads, progress.last) {
            let Progress { step, name, .. } = progress;
            self.say(&format!(
                "step {step:>5}  {name:<20} train {:.4}  validation {val_loss:.4}  {:.0} ms",
                last.loss, last.ms
            ));
        }
    }

    fn measured(&mut self, progress: &Progress<'_>, stats: &StatsReport) {
        if !self.leads {
            return;
        }
        self.say(&format!(
            "step {}  {}\n{stats}",
            progress.step, progress.name
        ));
        let written = append_stats(self.dir.join(STATS), progress.name, progress.step, stats);
        if let (Err(error), Ok(())) = (written, &self.failed) {
            self.failed = Err(error.into());
            self.stop.request();
        }
    }
}
