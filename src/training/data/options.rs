//! What a dataset is made of.

use super::error::DataError;
use fp8_core::setters;
use std::path::PathBuf;

/// How files become rows.
///
/// ```
/// use fp8::training::{DatasetOptions, Validation};
/// let options = DatasetOptions::new(512)
///     .with_validation(Validation::Share(0.1))
///     .with_seed(7);
/// assert!(options.packing);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct DatasetOptions {
    /// Tokens of a row, at least 2.
    pub context: usize,
    /// Whether a row may hold several documents, side by side without attention to each other; yes by default. Labelled texts have a row
    /// each in any case.
    pub packing: bool,
    /// What validation reads; a twentieth of the data by default.
    pub validation: Validation,
    /// The seed of the order of rows. What is held out for validation does not depend on it.
    pub seed: u64,
    /// What the rows are for; `None` decides by the files: classification if they have labels, embedding if they have queries.
    pub task: Option<Task>,
    /// Whether the model's end token follows each text, unless the tokenizer puts it there itself; yes by default. Chats end as their
    /// template says.
    pub end_of_text: bool,
    /// Classes that a model knows already, in their order: they are the classes if every label is one of them, by name or, for an integer
    /// that is no name, by number. Otherwise, and by default, the classes are the labels in order.
    pub labels: Vec<String>,
}

/// What validation reads.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Validation {
    /// Nothing.
    None,
    /// This share, at least 0 and below 1: of the pieces of plain text files, and of the documents of all other files. Both are drawn at
    /// random, always the same ones. At least one is drawn, if there are two and the share is not 0.
    Share(f64),
    /// Files of its own, of the same formats.
    Files(Vec<PathBuf>),
}

/// What rows are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Task {
    /// To predict each next token.
    LanguageModel,
    /// To predict the label of a text.
    Classification,
    /// To tell the text that belongs to a query from others.
    Embedding,
}

impl DatasetOptions {
    /// The defaults, for rows of `context` tokens.
    pub fn new(context: usize) -> Self {
        Self {
            context,
            packing: true,
            validation: Validation::Share(0.05),
            seed: 0,
            task: None,
            end_of_text: true,
            labels: vec![],
        }
    }

    /// Checks the values; [`Dataset::open`](crate::training::Dataset::open) does it too.
    ///
    /// # Errors
    /// [`DataError::Option`].
    pub fn check(&self) -> Result<(), DataError> {
        if self.context < 2 {
            return Err(DataError::Option {
                option: "context",
                value: self.context.to_string(),
                expected: "at least 2 tokens, of which one predicts the other",
            });
        }
        match &self.validation {
            Validation::Share(share) if !(0. ..1.).contains(share) => Err(DataError::Option {
                option: "validation",
                value: share.to_string(),
                expected: "a share of at least 0 and below 1",
            }),
            Validation::Files(files) if files.is_empty() => Err(DataError::Option {
                option: "validation",
                value: "an empty list of files".into(),
                expected: "at least one file",
            }),
            _ => Ok(()),
        }
    }
}

setters! { DatasetOptions:
    /// Sets [`DatasetOptions::packing`].
    with_packing(packing: bool);
    /// Sets what validation reads.
    with_validation(validation: Validation);
    /// Sets the seed of the order of rows.
    with_seed(seed: u64);
    /// Sets what the rows are for.
    with_task(task: impl Into<Option<Task>>);
    /// Sets [`DatasetOptions::end_of_text`].
    with_end_of_text(end_of_text: bool);
    /// Sets [`DatasetOptions::labels`].
    with_labels(labels: Vec<String>);
}
