//! The files of a run: `metrics.jsonl`, line by line, and `summary.json` at the end.

use crate::runs;
use anyhow::{Context, Result};
use fp8::atomic::write_atomic;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// A line of `metrics.jsonl`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Line {
    Train {
        recipe: String,
        step: u64,
        train_loss: f64,
        lr: f64,
        /// None where it was not finite, and the step was skipped.
        grad_norm: Option<f64>,
        step_ms: f64,
    },
    Validation {
        recipe: String,
        step: u64,
        val_loss: f64,
    },
}

impl Line {
    pub fn recipe(&self) -> &str {
        match self {
            Line::Train { recipe, .. } | Line::Validation { recipe, .. } => recipe,
        }
    }

    pub fn step(&self) -> u64 {
        match self {
            Line::Train { step, .. } | Line::Validation { step, .. } => *step,
        }
    }
}

/// One run in `summary.json`.
#[derive(Debug, Serialize)]
pub struct Summary {
    pub recipe: String,
    pub steps: u64,
    pub final_train_loss: f64,
    pub final_val_loss: f64,
    /// Steps that were skipped because a gradient was not finite.
    pub skipped_steps: usize,
    pub median_step_ms: f64,
    pub tokens_per_s: f64,
    /// As served: see `Run::served_weight_bytes`.
    pub linear_weight_bytes: usize,
    /// Linear layers with FP8 state.
    pub converted_layers: usize,
    /// Tensors cast to FP8, in forward and backward passes, training and validation.
    pub quantized_tensors: u64,
    /// As in `config.json`.
    pub model: serde_json::Value,
    pub parameters: u64,
    pub micro_batches: usize,
    pub ranks: usize,
    /// What the ranks divide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parallel: Option<&'static str>,
    /// What this rank has sent to others, by operation, over all runs.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub sent: BTreeMap<String, Sent>,
    /// With `--profile`, milliseconds of a step by kind of work.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile_ms: Option<BTreeMap<&'static str, f64>>,
}

/// What a rank sends in a step, for one operation.
#[derive(Debug, Serialize)]
pub struct Sent {
    pub calls_per_step: f64,
    pub bytes_per_step: f64,
}

/// The metrics of all runs, in memory and in the file.
pub struct Metrics {
    path: PathBuf,
    /// None on ranks that do not write.
    out: Option<BufWriter<File>>,
    pub lines: Vec<Line>,
}

impl Metrics {
    /// Begins a file, or continues one with the lines that `keep` accepts: those of steps that a resumed run will not
    /// repeat. A line that a kill cut short is dropped.
    pub fn open(dir: &Path, keep: impl Fn(&Line) -> bool) -> Result<Self> {
        let path = dir.join("metrics.jsonl");
        let old = match path.exists() {
            true => runs::read(&path)?,
            false => String::new(),
        };
        let lines: Vec<Line> = old
            .lines()
            .filter_map(|line| serde_json::from_str(line).ok())
            .filter(keep)
            .collect();
        write_atomic(&path, |out| {
            for line in &lines {
                serde_json::to_writer(&mut *out, line)?;
                out.write_all(b"\n")?;
            }
            Ok(())
        })?;
        let file = OpenOptions::new()
            .append(true)
            .open(&path)
            .with_context(|| format!("writing {}", path.display()))?;
        Ok(Self {
            path,
            out: Some(BufWriter::new(file)),
            lines,
        })
    }

    /// Metrics of a rank that does not write.
    pub fn silent() -> Self {
        Self {
            path: PathBuf::new(),
            out: None,
            lines: vec![],
        }
    }

    pub fn push(&mut self, line: Line) -> Result<()> {
        let context = || format!("writing {}", self.path.display());
        if let Some(out) = &mut self.out {
            serde_json::to_writer(&mut *out, &line).with_context(context)?;
            out.write_all(b"\n").with_context(context)?;
            out.flush().with_context(context)?;
        }
        self.lines.push(line);
        Ok(())
    }

    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Line> {
        self.lines.iter().filter(move |line| line.recipe() == name)
    }

    /// (step, loss) of a recipe's training steps.
    pub fn train_curve(&self, name: &str) -> Vec<(u64, f64)> {
        let point = |line: &Line| match *line {
            Line::Train {
                step, train_loss, ..
            } => Some((step, train_loss)),
            _ => None,
        };
        self.of(name).filter_map(point).collect()
    }

    /// (step, loss) of a recipe's validations.
    pub fn validation_curve(&self, name: &str) -> Vec<(u64, f64)> {
        let point = |line: &Line| match *line {
            Line::Validation { step, val_loss, .. } => Some((step, val_loss)),
            _ => None,
        };
        self.of(name).filter_map(point).collect()
    }

    /// Steps of a recipe that were skipped.
    pub fn skipped_steps(&self, name: &str) -> usize {
        let skipped = |line: &&Line| {
            matches!(
                line,
                Line::Train {
                    grad_norm: None,
                    ..
                }
            )
        };
        self.of(name).filter(skipped).count()
    }

    /// Median duration of a recipe's steps in milliseconds.
    pub fn median_step_ms(&self, name: &str) -> f64 {
        let ms = |line: &Line| match *line {
            Line::Train { step_ms, .. } => Some(step_ms),
            _ => None,
        };
        let mut all: Vec<f64> = self.of(name).filter_map(ms).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(0.)
    }
}

/// The file of `--stats`.
pub const STATS: &str = "stats.jsonl";

/// Drops the statistics of steps that a resumed run will repeat: those after the last finished step in `done`.
pub fn trim_stats(dir: &Path, done: &BTreeMap<String, u64>) -> Result<()> {
    let path = dir.join(STATS);
    if !path.exists() {
        return Ok(());
    }
    let old = runs::read(&path)?;
    let kept = old.lines().filter(|line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_default();
        let last = line["recipe"].as_str().and_then(|name| done.get(name));
        last.zip(line["step"].as_u64())
            .is_some_and(|(last, step)| step <= *last)
    });
    Ok(write_atomic(&path, |out| {
        kept.clone().try_for_each(|line| writeln!(out, "{line}"))
    })?)
}

pub fn write_summary(dir: &Path, summaries: &[Summary]) -> Result<()> {
    write_json(&dir.join("summary.json"), summaries)
}

pub fn write_json(path: &Path, value: &(impl Serialize + ?Sized)) -> Result<()> {
    Ok(write_atomic(path, |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        out.write_all(b"\n")
    })?)
}
