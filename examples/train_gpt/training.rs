//! Trains several runs side by side.

use crate::data::Data;
use crate::ranks::Ranks;
use crate::record::{Line, Metrics, STATS};
use crate::run::{Run, Step};
use crate::settings::Settings;
use anyhow::{Context, Result, ensure};
use fp8::StatsReport;
use indicatif::{ProgressBar, ProgressStyle};
use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Batches of a validation during training.
const VALIDATION_BATCHES: usize = 4;
/// Steps between two readings of losses, on devices where reading waits.
const READ_EVERY: u64 = 10;

/// Trains every run to the end, taking turns step by step, so that their times compare. Returns false after Ctrl-C.
pub fn train(
    runs: &mut [Run],
    settings: &Settings,
    data: &Data,
    metrics: &mut Metrics,
    dir: &Path,
    checkpoint_every: u64,
    ranks: &Ranks,
) -> Result<bool> {
    let stop = Arc::new(AtomicBool::new(false));
    let flag = stop.clone();
    ctrlc::set_handler(move || {
        if flag.swap(true, Ordering::SeqCst) {
            // A second Ctrl-C ends the program at once; files are replaced atomically, so none is left half-written.
            std::process::exit(130);
        }
    })?;
    let batch = settings.batch;
    let validation = data.validation_batches(VALIDATION_BATCHES, batch, settings.model.context)?;
    let validate_every = (settings.steps / 10).max(1);
    let tokens = (batch * settings.model.context) as f64;

    let bar = match ranks.leads() {
        true => ProgressBar::new(settings.steps * runs.len() as u64),
        false => ProgressBar::hidden(),
    };
    let bar = bar.with_style(ProgressStyle::with_template(
        "{bar:30} step {msg} [{elapsed}, {eta} left]",
    )?);
    bar.set_position(runs.iter().map(|run| run.step).sum());
    bar.reset_eta();
    // After a kill between two checkpoint files the runs are at different steps: those behind catch up.
    while let Some(step) = runs
        .iter()
        .map(|run| run.step)
        .min()
        .filter(|&s| s < settings.steps)
    {
        for run in runs.iter_mut().filter(|run| run.step == step) {
            run.train_step(data)?;
            bar.inc(1);
            if let Some(stats) = run.take_stats().filter(|_| ranks.leads()) {
                append_stats(dir, run, &stats)?;
                say(&bar, &format!("step {}  {}\n{stats}", run.step, run.name));
            }
            let validates = run.step % validate_every == 0 && run.step < settings.steps;
            let saves = run.step % checkpoint_every == 0;
            let reads = validates || saves || run.step.is_multiple_of(READ_EVERY);
            if !reads && run.is_asynchronous() {
                continue;
            }
            let last = log_steps(run, metrics)?;
            if let Some(done) = &last {
                bar.set_message(format!(
                    "{}/{} {}: loss {:.3}, {:.0} tokens/s",
                    run.step,
                    settings.steps,
                    run.name,
                    done.loss,
                    tokens / done.ms * 1e3
                ));
            }
            // Ranks with parts of the parameters compute together.
            let validates = validates && (ranks.leads() || ranks.is_sharded());
            if let (true, Some(done)) = (validates, &last) {
                let val_loss = run.validate(&validation)?;
                metrics.push(Line::Validation {
                    recipe: run.name.clone(),
                    step: run.step,
                    val_loss,
                })?;
                let text = format!(
                    "step {:>5}  {:<20} train {:.4}  validation {val_loss:.4}  {:.0} ms",
                    run.step, run.name, done.loss, done.ms
                );
                if ranks.leads() {
                    say(&bar, &text);
                }
            }
            if saves {
                run.save(dir)?;
            }
        }
        if stop.load(Ordering::SeqCst) {
            for run in runs.iter_mut() {
                log_steps(run, metrics)?;
            }
            bar.abandon();
            return Ok(false);
        }
    }
    for run in runs.iter_mut() {
        log_steps(run, metrics)?;
    }
    bar.finish_and_clear();
    Ok(true)
}

/// Prints a line above the bar.
fn say(bar: &ProgressBar, text: &str) {
    match bar.is_hidden() {
        true => println!("{text}"),
        false => bar.println(text),
    }
}

/// Appends a JSON line for each layer and operand that the step has cast.
fn append_stats(dir: &Path, run: &Run, stats: &StatsReport) -> Result<()> {
    let path = dir.join(STATS);
    let mut lines = String::new();
    for row in &stats.rows {
        let mut line = serde_json::to_value(row)?;
        line["recipe"] = run.name.clone().into();
        line["step"] = run.step.into();
        lines.push_str(&format!("{line}\n"));
    }
    let mut options = OpenOptions::new();
    let file = options.create(true).append(true).open(&path);
    file.and_then(|mut file| file.write_all(lines.as_bytes()))
        .with_context(|| format!("writing {}", path.display()))
}

/// Writes the steps that have not been read yet and returns the last of them.
fn log_steps(run: &mut Run, metrics: &mut Metrics) -> Result<Option<Step>> {
    let mut last = None;
    for step in run.read_steps()? {
        ensure!(
            step.loss.is_finite(),
            "{}: the loss of step {} is {}",
            run.name,
            step.step,
            step.loss
        );
        metrics.push(Line::Train {
            recipe: run.name.clone(),
            step: step.step,
            train_loss: step.loss,
            lr: step.lr,
            grad_norm: Some(step.grad_norm).filter(|norm| norm.is_finite()),
            step_ms: step.ms,
        })?;
        last = Some(step);
    }
    Ok(last)
}
