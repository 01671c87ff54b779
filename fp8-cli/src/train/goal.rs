//! The objective of a run, as its model and its data decide.

use super::settings::Settings;
use anyhow::{Result, bail};
use fp8::load::Checkpoint;
use fp8::models::gguf::is_gguf;
use fp8::models::{Config, Model, Pooling, Tokenizer, config_of};
use fp8::training::{Classify, Contrast, Dataset, NextToken, Objective, Rows, Task};
use std::path::Path;

/// An objective of any kind.
pub type Goal = Box<dyn Objective<Model, Batch = Rows>>;

/// What a run learns.
pub struct Lesson {
    pub goal: Goal,
    pub task: Task,
    /// The classes; empty unless texts are classified.
    pub labels: Vec<String>,
    /// The data in words.
    pub described: String,
}

/// The classes of the encoder at `path`; None for a language model.
pub fn known_classes(path: &Path) -> Result<Option<Vec<String>>> {
    if is_gguf(path) {
        return Ok(None);
    }
    Ok(match config_of(&Checkpoint::open_dir(path)?, path)? {
        Config::Bert(config) => Some(config.labels),
        _ => None,
    })
}

impl Lesson {
    /// The objective for the model at `path`: a language model predicts tokens, an encoder learns labels or queries, as the data have them.
    pub fn new(settings: &Settings, path: &Path, tokenizer: &Tokenizer) -> Result<Self> {
        let options = match known_classes(path)? {
            None => settings.dataset().with_task(Task::LanguageModel),
            Some(labels) => settings.dataset().with_labels(labels),
        };
        let is_encoder = options.task.is_none();
        let data = Dataset::open(&settings.data, tokenizer, &options)?;
        let (described, task) = (data.description(), data.task());
        let (labels, rows, seed) = (data.labels().to_vec(), settings.batch, settings.seed);
        let goal: Goal = match task {
            Task::LanguageModel if is_encoder => bail!(
                "{} is an encoder: it learns lines of `text` and `label`, or of `query` and `positive`",
                path.display()
            ),
            Task::LanguageModel => Box::new(NextToken::new(data, rows)?.with_dropout_seed(seed)),
            Task::Classification => Box::new(Classify::new(data, rows)?.with_dropout_seed(seed)),
            Task::Embedding => Box::new(
                Contrast::new(data, rows)?
                    .with_temperature(settings.temperature)?
                    .with_pooling(Pooling::of_dir(path)?)
                    .with_dropout_seed(seed),
            ),
            _ => bail!("this kind of data cannot be learned"),
        };
        Ok(Self {
            goal,
            task,
            labels,
            described,
        })
    }
}

/// A validation in words.
pub fn judged(task: Task, loss: f64, accuracy: Option<f64>) -> String {
    match (task, accuracy) {
        (Task::LanguageModel, _) => format!("{loss:.4} (perplexity {:.3})", loss.exp()),
        (_, Some(accuracy)) => format!("{loss:.4} (accuracy {:.2}%)", 100. * accuracy),
        (_, None) => format!("{loss:.4}"),
    }
}
