//! Shows a run: a bar, losses, speed and memory; writes statistics.

use crate::output::size;
use anyhow::Result;
use fp8::StatsReport;
use fp8::memory_in_use;
use fp8::training::{Events, Progress, RunFolder, Stop};
use indicatif::{ProgressBar, ProgressStyle};

/// Prints what happens in a run.
pub struct Watch<'a> {
    bar: ProgressBar,
    folder: &'a RunFolder,
    /// The first error of writing statistics, which the run ends with.
    pub failed: Result<()>,
    stop: Stop,
}

impl<'a> Watch<'a> {
    pub fn new(folder: &'a RunFolder, done: u64, steps: u64, stop: &Stop) -> Result<Self> {
        let bar = ProgressBar::new(steps).with_style(ProgressStyle::with_template(
            "{bar:30} step {msg} [{elapsed}, {eta} left]",
        )?);
        bar.set_position(done);
        bar.reset_eta();
        Ok(Self {
            bar,
            folder,
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

    pub fn end(self) -> Result<()> {
        self.bar.finish_and_clear();
        self.failed
    }
}

impl Events for Watch<'_> {
    fn stepped(&mut self, progress: &Progress<'_>) {
        self.bar.set_position(progress.step);
        if let Some(last) = progress.last {
            self.bar.set_message(format!(
                "{}/{}: loss {:.3}, {:.0} tokens/s{}",
                progress.step,
                progress.steps,
                last.loss,
                last.tokens as f64 / last.ms * 1e3,
                memory()
            ));
        }
    }

    fn validated(&mut self, progress: &Progress<'_>, val_loss: f64) {
        let (mut train, mut speed) = (String::new(), String::new());
        if let Some(last) = progress.last {
            train = format!("train {:.4}  ", last.loss);
            speed = format!("  {:.0} tokens/s", last.tokens as f64 / last.ms * 1e3);
        }
        let step = progress.step;
        self.say(&format!(
            "step {step:>5}  {train}validation {val_loss:.4} (perplexity {:.3}){speed}{}",
            val_loss.exp(),
            memory()
        ));
    }

    fn measured(&mut self, progress: &Progress<'_>, stats: &StatsReport) {
        self.say(&format!("step {}\n{stats}", progress.step));
        let written = self
            .folder
            .append_stats(progress.name, progress.step, stats);
        if let (Err(error), Ok(())) = (written, &self.failed) {
            self.failed = Err(error.into());
            self.stop.request();
        }
    }
}

fn memory() -> String {
    memory_in_use().map_or(String::new(), |used| format!(", {}", size(used.resident)))
}
