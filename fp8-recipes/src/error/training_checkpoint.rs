//! Errors of training checkpoints.

use std::path::PathBuf;

/// Why a training checkpoint cannot be made or resumed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TrainingCheckpointError {
    /// A checkpoint was to be saved in the middle of a step. Saving ends the step, so the rest of it would compute with other scales.
    #[error(
        "saving would end the FP8 step that is open on this thread, in which layer `{layer}` has computed and no change of its \
         parameters was announced or noticed: save after the optimizer's step, or call end_step() first if this is where the step ends"
    )]
    UnfinishedStep {
        /// Path of a layer that the step has used.
        layer: String,
    },
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
