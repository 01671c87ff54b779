//! Errors of training runs.

use std::path::PathBuf;

/// An error of a training run.
///
/// ```
/// use fp8::training::{RunFolder, Error};
/// match RunFolder::open("no/such/run") {
///     Err(Error::NoRun { path, .. }) => assert!(path.ends_with("run")),
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A recipe, a layer, an optimizer or a file.
    #[error(transparent)]
    Fp8(Box<crate::Error>),
    /// A model.
    #[error(transparent)]
    Model(Box<crate::models::Error>),
    /// The data.
    #[error(transparent)]
    Data(Box<super::data::DataError>),
    /// An operation of candle.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// A file could not be read or written.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What failed; the message has it after "cannot".
        action: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// A setting is out of range.
    #[error("{key} is {value}, expected {expected}")]
    Setting {
        /// The setting.
        key: &'static str,
        /// Its value.
        value: String,
        /// What was expected.
        expected: &'static str,
    },
    /// A loss is Inf or NaN, or the gradients of too many steps in a row were.
    #[error(
        "{name}: {what} in step {step} is not finite; Inf or NaN came first from {origin}; {}",
        last_checkpoint(.checkpoint)
    )]
    NotFinite {
        /// The run.
        name: String,
        /// The step, from 1.
        step: u64,
        /// What was not finite.
        what: NotFinite,
        /// The layer and operand, or the parameter, where it was first seen.
        origin: String,
        /// The last checkpoint before that, and its step.
        checkpoint: Option<(PathBuf, u64)>,
    },
    /// The loss does not depend on some of the trained parameters.
    #[error("{name}: no gradient reached {}", parameters.join(", "))]
    NoGradient {
        /// The run.
        name: String,
        /// The parameters.
        parameters: Vec<String>,
    },
    /// A model or its data is of another kind than its objective.
    #[error("to {objective} takes {expected}")]
    Objective {
        /// What is to be learned.
        objective: &'static str,
        /// What that takes.
        expected: &'static str,
    },
    /// The classes of a model differ from those of its data.
    #[error("the data has the classes {data}, the model {}", classes(.model))]
    Labels {
        /// The classes of the model.
        model: String,
        /// The classes of the data.
        data: String,
    },
    /// No micro-batch of a step has a token or a label to learn from.
    #[error("step {step}: no token of the batch has a target")]
    EmptyBatch {
        /// The step, from 1.
        step: u64,
    },
    /// A checkpoint was written by a run with other settings.
    #[error("{}: {}", path.display(), differs(.key, .saved, .now))]
    OtherRun {
        /// The checkpoint.
        path: PathBuf,
        /// The setting that differs.
        key: String,
        /// Its value in the checkpoint.
        saved: String,
        /// Its value now.
        now: String,
    },
    /// A folder holds no run to resume.
    #[error("{} holds no run to resume: {reason}", path.display())]
    NoRun {
        /// The folder.
        path: PathBuf,
        /// What is missing.
        reason: String,
    },
    /// A folder for a new run holds another one.
    #[error(
        "{} holds an earlier run (run.json): resume it, replace it, or name another folder",
        path.display()
    )]
    RunExists {
        /// The folder.
        path: PathBuf,
    },
    /// The folder holds what a run would write, but no run: it belongs to another program.
    #[error(
        "{} holds {found} but no run.json, so no run wrote it: remove it, or choose another folder",
        path.display()
    )]
    NotOfARun {
        /// The folder.
        path: PathBuf,
        /// A file or folder with a name that a run gives to its own.
        found: String,
    },
    /// The drawing of the losses failed.
    #[error("cannot draw the losses: {reason}")]
    Plot {
        /// Why.
        reason: String,
    },
}

/// What was Inf or NaN and ended a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum NotFinite {
    /// The loss of a step.
    Loss,
    /// The loss of a validation.
    Validation,
    /// The gradients of this many steps in a row, which were skipped.
    Gradients(u32),
}

impl std::fmt::Display for NotFinite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Loss => f.write_str("the loss"),
            Self::Validation => f.write_str("the validation loss"),
            Self::Gradients(steps) => write!(f, "the gradient, the last of {steps} in a row,"),
        }
    }
}

/// The result of an operation of this module.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn classes(labels: &str) -> String {
    match labels.is_empty() {
        true => "no classifier".to_string(),
        false => format!("has {labels}"),
    }
}

/// What a run to resume has otherwise. The fingerprint of data says nothing to people.
fn differs(key: &str, saved: &str, now: &str) -> String {
    match key {
        "data" => format!(
            "the data files, the tokenizer or the size of batches have changed since the run began: data is {saved} in the run to resume, \
             {now} here"
        ),
        _ => format!("{key} is {saved} in the run to resume, {now} here"),
    }
}

fn last_checkpoint(checkpoint: &Option<(PathBuf, u64)>) -> String {
    match checkpoint {
        Some((path, step)) => format!("{} holds step {step}", path.display()),
        None => "there is no earlier checkpoint".to_string(),
    }
}

impl Error {
    pub(super) fn io(
        path: impl Into<PathBuf>,
        action: &'static str,
    ) -> impl FnOnce(std::io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            path,
            action,
            source,
        }
    }
}

impl From<crate::Error> for Error {
    fn from(error: crate::Error) -> Self {
        Self::Fp8(Box::new(error))
    }
}

impl From<crate::models::Error> for Error {
    fn from(error: crate::models::Error) -> Self {
        Self::Model(Box::new(error))
    }
}

impl From<super::data::DataError> for Error {
    fn from(error: super::data::DataError) -> Self {
        Self::Data(Box::new(error))
    }
}

impl From<crate::fp8_candle::Error> for Error {
    fn from(error: crate::fp8_candle::Error) -> Self {
        crate::Error::from(error).into()
    }
}

impl From<crate::FilesError> for Error {
    fn from(error: crate::FilesError) -> Self {
        crate::Error::from(error).into()
    }
}

impl From<crate::atomic::FileError> for Error {
    fn from(error: crate::atomic::FileError) -> Self {
        crate::Error::from(error).into()
    }
}

impl From<crate::optim::OptimError> for Error {
    fn from(error: crate::optim::OptimError) -> Self {
        crate::Error::from(error).into()
    }
}
