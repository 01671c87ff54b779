//! Errors of training data.

use crate::models::TextError;
use std::fmt;
use std::path::{Path, PathBuf};

/// A file, and a line of it if the file has lines of JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Place {
    /// The file.
    pub path: PathBuf,
    /// The line's number, from 1.
    pub line: Option<usize>,
}

impl Place {
    pub(super) fn file(path: &Path) -> Self {
        Self {
            path: path.to_path_buf(),
            line: None,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.path.display())?;
        match self.line {
            Some(line) => write!(f, ", line {line}"),
            None => Ok(()),
        }
    }
}

/// An error of a [`Dataset`](crate::training::Dataset).
///
/// ```
/// use fp8::training::{DataError, DatasetOptions};
/// let error = DatasetOptions::new(1).check().unwrap_err();
/// assert!(matches!(error, DataError::Option { option: "context", .. }));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// An option has a value that it cannot have.
    #[error("{option} is {value}: expected {expected}")]
    Option {
        /// Its name.
        option: &'static str,
        /// Its value.
        value: String,
        /// The values that it can have.
        expected: &'static str,
    },
    /// A file could not be read, or is not UTF-8.
    #[error(transparent)]
    File(#[from] fp8_files::Error),
    /// A folder could not be listed.
    #[error("cannot list {path}: {source}", path = .path.display())]
    Folder {
        /// The folder.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// A file or folder is empty.
    #[error("{path} is empty: expected {expected}", path = .path.display())]
    Empty {
        /// The file or folder.
        path: PathBuf,
        /// What it should have.
        expected: &'static str,
    },
    /// A line is not JSON.
    #[error("{place}, column {column}: not JSON: {reason}")]
    Json {
        /// The line.
        place: Place,
        /// The column of the first byte that does not fit.
        column: usize,
        /// What is wrong.
        reason: String,
    },
    /// A line or file has wrong content.
    #[error("{place}: {found}, expected {expected}")]
    Content {
        /// The line or file.
        place: Place,
        /// What it has.
        found: String,
        /// What was expected.
        expected: String,
    },
    /// A text could not be encoded, or the chat template refuses a chat.
    #[error("{place}: {source}{}", without_template(.source))]
    Text {
        /// The line or file.
        place: Place,
        /// The tokenizer's or template's error.
        source: TextError,
    },
    /// The tokenizer cannot be used: it contradicts itself, or puts more tokens around a text than a row has.
    #[error("the tokenizer: {0}")]
    Tokenizer(#[source] TextError),
    /// The chat template writes the beginning of a chat differently when more follows, so an answer's tokens cannot be told from the rest.
    #[error(
        "{place}: the chat template writes the chat up to {what} message {message} differently when the whole chat follows, so the \
         tokens of this answer are unknown; expected a template whose text only grows with the messages. A line for each answer, \
         with the messages before it as `prompt` and the answer as `completion`, may help"
    )]
    Turns {
        /// The line.
        place: Place,
        /// The answer, counted from 1 in the messages of the chat.
        message: usize,
        /// `the beginning of` or `the end of`.
        what: &'static str,
    },
    /// No row is left.
    #[error("no row of {part} is left of {documents} documents: {reason}")]
    NoRows {
        /// `training` or `validation`.
        part: &'static str,
        /// Documents that were read.
        documents: usize,
        /// Why.
        reason: String,
    },
    /// Labelled texts of a single class.
    #[error("all labels are `{label}`: expected at least two classes")]
    OneClass {
        /// The class.
        label: String,
    },
}

/// What else a model without a chat template can learn.
fn without_template(error: &TextError) -> &'static str {
    match error {
        TextError::NoChatTemplate { .. } => {
            ", or write lines of `prompt` and `completion`, which need none"
        }
        _ => "",
    }
}
