//! `metrics.jsonl`: a line for each step and for each validation.

use super::error::{Error, Result};
use super::learner::StepRecord;
use super::lines::{any_number, readable};
use crate::atomic::write_atomic;
use crate::read::read_text_if_present;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The name of the file.
pub(super) const METRICS: &str = "metrics.jsonl";
/// The largest file that is read again, in bytes.
const LIMIT: u64 = 1 << 30;

/// A line of `metrics.jsonl`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(
    untagged,
    expecting = "neither a step, with recipe, step and train_loss, nor a validation, with val_loss"
)]
#[non_exhaustive]
pub enum Line {
    /// A training step.
    Train {
        /// The name of the run.
        recipe: String,
        /// The step's number, from 1.
        step: u64,
        /// The mean loss of its batch, as [`any_number`] writes it.
        #[serde(with = "any_number")]
        train_loss: f64,
        /// The learning rate, if it is known.
        lr: Option<f64>,
        /// The norm of the gradients, as [`any_number`] writes it: Inf or NaN if the step was skipped because of them. None, for which
        /// nothing is written, if it is not known.
        #[serde(default, skip_serializing_if = "Option::is_none", with = "any_norm")]
        grad_norm: Option<f64>,
        /// Its duration in milliseconds, if it is known.
        step_ms: Option<f64>,
    },
    /// A validation.
    Validation {
        /// The name of the run.
        recipe: String,
        /// Finished steps.
        step: u64,
        /// The mean loss over held-out data, as [`any_number`] writes it.
        #[serde(with = "any_number")]
        val_loss: f64,
        /// The share of targets that were predicted correctly, if that is counted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        accuracy: Option<f64>,
    },
}

impl Line {
    /// The name of the run.
    pub fn recipe(&self) -> &str {
        match self {
            Line::Train { recipe, .. } | Line::Validation { recipe, .. } => recipe,
        }
    }

    /// The step, from 1.
    pub fn step(&self) -> u64 {
        match self {
            Line::Train { step, .. } | Line::Validation { step, .. } => *step,
        }
    }
}

/// The metrics of all runs of a folder, in memory and in `metrics.jsonl`.
///
/// ```
/// use fp8::training::{Metrics, StepRecord};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let dir = tempfile::tempdir()?;
/// let mut metrics = Metrics::open(dir.path(), |_| true)?;
/// metrics.push_step("delayed", &StepRecord::new(1, 2.5))?;
/// metrics.push_validation("delayed", 1, 2.75, None)?;
/// assert_eq!(metrics.train_curve("delayed"), [(1, 2.5)]);
/// metrics.push_step("delayed", &StepRecord::new(2, 2.25))?;
/// // A resumed run keeps the lines of the steps before its checkpoint.
/// let metrics = Metrics::open(dir.path(), |line| line.step() <= 1)?;
/// assert_eq!(metrics.lines().len(), 2);
/// # Ok(()) }
/// ```
#[derive(Debug)]
pub struct Metrics {
    path: PathBuf,
    /// None where nothing is written.
    out: Option<BufWriter<File>>,
    lines: Vec<Line>,
}

impl Metrics {
    /// Begins the file in `dir`, or continues it with the lines that `keep` accepts: those of steps that a resumed run will not repeat. A last line
    /// that a kill has cut short is dropped, and so are others that cannot be read, with one warning that names the first.
    ///
    /// # Errors
    /// If the file cannot be read or written.
    pub fn open(dir: impl AsRef<Path>, keep: impl Fn(&Line) -> bool) -> Result<Self> {
        let path = dir.as_ref().join(METRICS);
        let old = read_text_if_present(&path, LIMIT)?.unwrap_or_default();
        let mut lines: Vec<Line> = readable(&path, &old, |line| serde_json::from_str(line));
        lines.retain(keep);
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
            .map_err(Error::io(&path, "append to it"))?;
        Ok(Self {
            path,
            out: Some(BufWriter::new(file)),
            lines,
        })
    }

    /// Metrics that are only kept in memory.
    pub fn in_memory() -> Self {
        Self {
            path: PathBuf::new(),
            out: None,
            lines: vec![],
        }
    }

    /// All lines.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// Adds a line.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn push(&mut self, line: Line) -> Result<()> {
        if let Some(out) = &mut self.out {
            let text = serde_json::to_string(&line).unwrap_or_default() + "\n";
            let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            written.map_err(Error::io(&self.path, "write"))?;
        }
        self.lines.push(line);
        Ok(())
    }

    /// Adds the line of a step.
    ///
    /// # Errors
    /// As [`Metrics::push`].
    pub fn push_step(&mut self, name: &str, record: &StepRecord) -> Result<()> {
        self.push(Line::Train {
            recipe: name.to_string(),
            step: record.step,
            train_loss: record.loss,
            lr: finite(record.lr),
            grad_norm: record.grad_norm,
            step_ms: finite(record.ms),
        })
    }

    /// Adds the line of a validation.
    ///
    /// # Errors
    /// As [`Metrics::push`].
    pub fn push_validation(
        &mut self,
        name: &str,
        step: u64,
        val_loss: f64,
        accuracy: Option<f64>,
    ) -> Result<()> {
        self.push(Line::Validation {
            recipe: name.to_string(),
            step,
            val_loss,
            accuracy,
        })
    }

    /// The accuracy of the last validation of a run, if it was counted.
    pub fn last_accuracy(&self, name: &str) -> Option<f64> {
        let validations = self.of(name).filter_map(|line| match line {
            Line::Validation { accuracy, .. } => Some(*accuracy),
            Line::Train { .. } => None,
        });
        validations.last().flatten()
    }

    fn of<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Line> {
        self.lines.iter().filter(move |line| line.recipe() == name)
    }

    /// (step, loss) of the training steps of a run.
    pub fn train_curve(&self, name: &str) -> Vec<(u64, f64)> {
        let point = |line: &Line| match *line {
            Line::Train {
                step, train_loss, ..
            } => Some((step, train_loss)),
            _ => None,
        };
        self.of(name).filter_map(point).collect()
    }

    /// (step, loss) of the validations of a run.
    pub fn validation_curve(&self, name: &str) -> Vec<(u64, f64)> {
        let point = |line: &Line| match *line {
            Line::Validation { step, val_loss, .. } => Some((step, val_loss)),
            _ => None,
        };
        self.of(name).filter_map(point).collect()
    }

    /// The mean loss of the last training steps of a run, ten at most; NaN before the first.
    pub fn last_train_loss(&self, name: &str) -> f64 {
        let curve = self.train_curve(name);
        let last: Vec<f64> = curve.iter().rev().take(10).map(|point| point.1).collect();
        last.iter().sum::<f64>() / last.len() as f64
    }

    /// The mean loss of the training steps of a run that follow the last validation before its last step; None if there are none.
    pub fn mean_train_loss(&self, name: &str) -> Option<f64> {
        let train = self.train_curve(name);
        let last = train.last()?.0;
        let validations = self.validation_curve(name);
        let before = validations.iter().map(|point| point.0);
        let begin = before.filter(|&step| step < last).max().unwrap_or(0);
        let since: Vec<f64> = (train.iter().filter(|point| point.0 > begin))
            .map(|point| point.1)
            .collect();
        Some(since.iter().sum::<f64>() / since.len() as f64)
    }

    /// Steps of a run that were skipped because a gradient was not finite. Steps whose norm is not known do not count.
    pub fn skipped_steps(&self, name: &str) -> usize {
        let skipped = |line: &&Line| {
            matches!(
                line,
                Line::Train {
                    grad_norm: Some(norm),
                    ..
                } if !norm.is_finite()
            )
        };
        self.of(name).filter(skipped).count()
    }

    /// Median duration of the steps of a run in milliseconds, of an even number the longer one of the two in the middle; 0 before the first.
    pub fn median_step_ms(&self, name: &str) -> f64 {
        let ms = |line: &Line| match *line {
            Line::Train { step_ms, .. } => step_ms,
            _ => None,
        };
        let mut all: Vec<f64> = self.of(name).filter_map(ms).collect();
        all.sort_by(f64::total_cmp);
        all.get(all.len() / 2).copied().unwrap_or(0.)
    }
}

/// JSON has no Inf and no NaN.
fn finite(number: f64) -> Option<f64> {
    Some(number).filter(|number| number.is_finite())
}

/// [`any_number`] for a norm that is there. Earlier versions wrote null for one that was not finite.
mod any_norm {
    use super::any_number;
    use serde::{Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(
        norm: &Option<f64>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        match norm {
            Some(norm) => any_number::serialize(norm, serializer),
            None => serializer.serialize_none(),
        }
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Option<f64>, D::Error> {
        any_number::deserialize(deserializer).map(Some)
    }
}
