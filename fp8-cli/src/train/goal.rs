//! The objective of a run, as its model and its data decide.

use super::settings::Settings;
use crate::model::known_classes;
use crate::usage::Usage;
use anyhow::{Result, bail};
use fp8::models::{Model, Pooling, Tokenizer};
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
    /// Rows to train on, and to validate on.
    pub rows: [usize; 2],
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
        let counts = [data.rows(), data.validation_rows()];
        if let (Some(own), false) = (settings.own_temperature(), task == Task::Embedding) {
            let text = format!("--temperature is {own}, but the data has no queries");
            return Err(Usage(text).into());
        }
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
            rows: counts,
        })
    }

    /// What of the data the run cannot use as it was asked to.
    pub fn warnings(&self, settings: &Settings) -> Vec<String> {
        let [rows, validation] = self.rows;
        let mut warnings = vec![];
        // In a folder, such as one of sources, a table may well be text among texts.
        let named = settings.data.iter().chain(&settings.validation);
        warnings.extend(named.filter(|path| is_table(path)).map(|path| {
            format!(
                "{} is read as plain text, with its separators: write JSON lines, such as of `text`, to train on its columns",
                path.display()
            )
        }));
        if rows < settings.batch {
            warnings.push(format!(
                "--batch is {}, and the data has {rows} row{} to train on: each step repeats rows",
                settings.batch,
                if rows == 1 { "" } else { "s" },
            ));
        }
        if validation == 0 {
            let why = "no data is left for validation, so only training losses are shown: give more data, or --validation FILE";
            warnings.push(why.to_string());
        }
        warnings
    }
}

/// Whether a file's name is that of a table.
fn is_table(path: &Path) -> bool {
    path.extension().is_some_and(|extension| {
        let mut tables = ["csv", "tsv"].iter();
        tables.any(|table| extension.eq_ignore_ascii_case(table))
    })
}

/// A validation in words.
pub fn judged(task: Task, loss: f64, accuracy: Option<f64>) -> String {
    match (task, accuracy) {
        (Task::LanguageModel, _) => format!("{loss:.4} (perplexity {:.3})", loss.exp()),
        (_, Some(accuracy)) => format!("{loss:.4} (accuracy {:.2}%)", 100. * accuracy),
        (_, None) => format!("{loss:.4}"),
    }
}
