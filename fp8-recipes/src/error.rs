//! Errors of recipes, conversion and checkpoints.

use crate::config::ConfigError;
use std::path::PathBuf;

/// What can go wrong outside a tensor operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A recipe or configuration is unknown or inconsistent.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A tensor operation failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// The optimizer was given something that does not fit.
    #[error(transparent)]
    Optim(#[from] crate::optim::OptimError),
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] crate::atomic::FileError),
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file is not what its name says.
    #[error("{path} is not a valid safetensors file: {reason}")]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A JSON file or metadata entry does not parse.
    #[error("{path}: {what} is not valid: {reason}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: &'static str,
        /// What the parser said.
        reason: String,
    },
    /// An FP8 weight without the scale that gives it its value.
    #[error("tensor `{tensor}` holds FP8 values but there is no `{missing}` to scale them with")]
    MissingScale {
        /// Name of the weight.
        tensor: String,
        /// Name of the tensor that should be there.
        missing: String,
    },
    /// A tensor has another dtype than its place demands.
    #[error("tensor `{tensor}` has dtype {got}, expected {expected}")]
    TensorDType {
        /// Name of the tensor.
        tensor: String,
        /// Dtype found.
        got: String,
        /// Dtype that works.
        expected: String,
    },
    /// A tensor has another shape than its place demands.
    #[error("tensor `{tensor}` has shape {got:?}, expected {expected}")]
    TensorShape {
        /// Name of the tensor.
        tensor: String,
        /// Shape found.
        got: Vec<usize>,
        /// Shape that works.
        expected: String,
    },
    /// A tensor that must be there is not.
    #[error("{place} has no tensor `{tensor}`")]
    MissingTensor {
        /// Name of the tensor.
        tensor: String,
        /// Where it was looked for.
        place: String,
    },
    /// Two files name the same tensor.
    #[error("tensor `{tensor}` is in {first} and in {second}")]
    DuplicateTensor {
        /// Name of the tensor.
        tensor: String,
        /// First file.
        first: PathBuf,
        /// Second file.
        second: PathBuf,
    },
    /// The checkpoint was made by another run than the one that wants to go on.
    #[error("{path} cannot be resumed: {what} is {found} there, {expected} here")]
    ResumeMismatch {
        /// The checkpoint.
        path: PathBuf,
        /// What differs.
        what: String,
        /// Value in the checkpoint.
        found: String,
        /// Value of this run.
        expected: String,
    },
    /// A guard was to open on a worker of a rayon pool.
    #[error(
        "no autocast guard opens on worker {worker} of a rayon pool: while it waits it runs other tasks, which would see the \
         guard. Open it outside of the pool and carry it in with AutocastHandle::run, or use std threads"
    )]
    OnPoolWorker {
        /// Index of the worker in its pool.
        worker: usize,
    },
    /// A handle or an inner guard outlived the guard that it comes from.
    #[error(
        "the autocast guard that this context comes from is closed: its step has ended, open the handle or the inner guard \
         while it lives"
    )]
    GuardClosed,
    /// The system gave no thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// A layer has no state for a tensor that the recipe casts.
    #[error("layer `{path}` keeps no state for its {role}")]
    NoRole {
        /// Path of the layer.
        path: String,
        /// The tensor role.
        role: &'static str,
    },
    /// Export of a layer whose weight is another one than at its calibration.
    #[error(
        "layer `{path}`: the weight has changed since calibration, which its scales no longer describe: calibrate again"
    )]
    ChangedSinceCalibration {
        /// Path of the layer.
        path: String,
    },
    /// Export of a layer that never saw a calibration batch.
    #[error(
        "layer `{path}` was not calibrated: run at least one batch through it under a calibrating guard"
    )]
    NotCalibrated {
        /// Path of the layer.
        path: String,
    },
    /// Export of a layer that the file format cannot hold beside the others.
    #[error("layer `{path}` cannot be exported: {reason}")]
    NotExportable {
        /// Path of the layer.
        path: String,
        /// What does not fit.
        reason: String,
    },
    /// Export of a model without FP8 layers.
    #[error("no layer of the model is prepared for FP8: nothing to export")]
    NothingToExport,
    /// Export of a tensor that has no name.
    #[error("a tensor of shape {shape:?} has no path: build it from a VarBuilder or name it")]
    Unnamed {
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// Two different tensors with one name.
    #[error("two different tensors are named `{tensor}`")]
    NameClash {
        /// The name.
        tensor: String,
    },
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}

/// Result of this crate's own operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
