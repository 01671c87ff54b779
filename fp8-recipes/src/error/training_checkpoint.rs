//! Errors of training checkpoints.

use std::path::PathBuf;

/// Why a training checkpoint cannot be made or resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingCheckpointError {
    /// The checkpoint does not fit the run.
    #[error("{path} cannot be resumed: {what} is {found} there, {expected} here")]
    Mismatch {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: String,
        /// Its value in the checkpoint.
        found: String,
        /// Its value in this run.
        expected: String,
    },
    /// An optimizer holds a variable that the run does not have.
    #[error(
        "the optimizer holds the variable `{name}`, which is not in the VarMap: a checkpoint would miss it"
    )]
    ForeignVariable {
        /// The optimizer's name of it.
        name: String,
    },
}
