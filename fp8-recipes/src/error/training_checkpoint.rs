//! Errors of training checkpoints.

use std::path::PathBuf;

/// Why a training checkpoint cannot be resumed.
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
}
