//! Shows runs of `fp8::training`: a bar, losses and speed; statistics of casts; requests to stop.

use crate::requests::{Request, on_request};
use anyhow::Result;
use fp8::StatsReport;
use fp8::training::{Events, Progress, StepRecord, Stop, append_stats};
use indicatif::{ProgressBar, ProgressStyle};
use std::io::{ErrorKind, Write};
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};

/// Prints what happens in one or several runs.
pub struct Watch<'a> {
    bar: ProgressBar,
    look: Look<'a>,
    /// The first error of writing lines or statistics, which the runs end with.
    failed: Result<()>,
    stop: Stop,
    /// The first request of the system to stop.
    request: Arc<OnceLock<Request>>,
}

/// What is shown, and where.
pub struct Look<'a> {
    /// Steps of all runs.
    pub steps: u64,
    /// Those that are done.
    pub done: u64,
    /// Whether this process shows anything: of several ranks one does.
    pub leads: bool,
    /// Whether this process trains alone, and so may stop where it is: of several ranks, one that stopped would leave the others waiting.
    pub alone: bool,
    /// Whether lines name their run.
    pub named: bool,
    /// The file of statistics.
    pub stats: PathBuf,
    /// A validation loss and the accuracy, if there is one, in words.
    pub judged: &'a dyn Fn(f64, Option<f64>) -> String,
    /// What else is said of the program, such as its memory.
    pub note: fn() -> String,
}

impl<'a> Watch<'a> {
    /// From now on Ctrl-C and SIGTERM stop the runs of a lone process after the current step, and a second one ends the program at once.
    pub fn new(look: Look<'a>) -> Result<Self> {
        let (stop, request) = (Stop::default(), Arc::<OnceLock<Request>>::default());
        if look.alone {
            let (asked, first) = (stop.clone(), request.clone());
            on_request(move |request| {
                let _ = first.set(request);
                if asked.request() {
                    // Files are replaced atomically, so none is left half-written.
                    std::process::exit(request.code().into());
                }
                eprintln!("stopping after this step; again to abort");
            })?;
        }
        let bar = match look.leads {
            true => ProgressBar::new(look.steps),
            false => ProgressBar::hidden(),
        };
        let bar = bar.with_style(ProgressStyle::with_template(
            "{bar:30} step {msg} [{elapsed}, {eta} left]",
        )?);
        bar.set_position(look.done);
        bar.reset_eta();
        Ok(Self {
            bar,
            look,
            failed: Ok(()),
            stop,
            request,
        })
    }

    /// What stops the runs.
    pub fn stop(&self) -> Stop {
        self.stop.clone()
    }

    /// The first request of the system to stop, also where it comes later.
    pub fn requests(&self) -> Arc<OnceLock<Request>> {
        self.request.clone()
    }

    /// Prints a line above the bar. A reader that has closed the pipe, such as `head`, ends no run, and a full disk does.
    fn say(&mut self, text: &str) {
        if !self.bar.is_hidden() {
            return self.bar.println(text);
        }
        let mut stdout = std::io::stdout().lock();
        let written = writeln!(stdout, "{text}").and_then(|()| stdout.flush());
        match written {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => self.fail(error.into()),
            _ => {}
        }
    }

    /// Keeps the first error, and stops the runs.
    fn fail(&mut self, error: anyhow::Error) {
        if self.failed.is_ok() {
            self.failed = Err(error);
            self.stop.request();
        }
    }

    /// The name of a run, where lines have one.
    fn name(&self, progress: &Progress<'_>) -> String {
        match self.look.named {
            true => format!("{:<20} ", progress.name),
            false => String::new(),
        }
    }

    pub fn end(self) -> Result<()> {
        self.bar.finish_and_clear();
        self.failed
    }
}

impl Events for Watch<'_> {
    fn stepped(&mut self, progress: &Progress<'_>) {
        self.bar.inc(1);
        if let Some(last) = progress.last {
            let Progress { step, steps, .. } = progress;
            let (name, note) = (self.name(progress), (self.look.note)());
            let (loss, speed) = (last.loss, speed(last));
            self.bar.set_message(format!(
                "{step}/{steps} {name}loss {loss:.3}, {speed}{note}"
            ));
        }
    }

    fn validated(&mut self, progress: &Progress<'_>, val_loss: f64) {
        if !self.look.leads {
            return;
        }
        let (mut train, mut end) = (String::new(), String::new());
        if let Some(loss) = progress.mean_loss {
            train = format!("train {loss:.4}  ");
        }
        if let Some(last) = progress.last {
            end = format!("  {}", speed(last));
        }
        let (step, name) = (progress.step, self.name(progress));
        let judged = (self.look.judged)(val_loss, progress.accuracy);
        let note = (self.look.note)();
        self.say(&format!(
            "step {step:>5}  {name}{train}validation {judged}{end}{note}"
        ));
    }

    fn measured(&mut self, progress: &Progress<'_>, stats: &StatsReport) {
        if !self.look.leads {
            return;
        }
        let (step, name) = (progress.step, self.name(progress));
        self.say(&format!("step {step}  {name}\n{stats}"));
        let written = append_stats(&self.look.stats, progress.name, step, stats);
        if let Err(error) = written {
            self.fail(error.into());
        }
    }
}

fn speed(step: &StepRecord) -> String {
    let tokens = step.tokens as f64 / step.ms * 1e3;
    format!("{tokens:.0} tokens/s, {:.0} ms", step.ms)
}
