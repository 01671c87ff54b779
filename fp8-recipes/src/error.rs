//! Errors of recipes, conversion and checkpoints.

use crate::config::ConfigError;
use crate::optim::OptimError;
use fp8_candle::Role;
use fp8_files::atomic::FileError;
use std::path::PathBuf;

/// What can go wrong outside a tensor operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A pattern of layers to treat specially names none: most likely a typo.
    #[error("`{pattern}` names no layer{}", near_text(near))]
    UnmatchedPattern {
        /// The pattern.
        pattern: String,
        /// Paths of the model that it may have meant.
        near: Vec<String>,
    },

    /// A batch norm cannot be folded into the layer before it.
    #[error("batch norm `{batch_norm}` cannot be folded into layer `{layer}`: {reason}")]
    CannotFold {
        /// Path of the layer.
        layer: String,
        /// Path of the batch norm.
        batch_norm: String,
        /// What is in the way.
        reason: String,
    },

    /// A recipe or configuration is unknown or inconsistent.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// An operation of candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// An FP8 operation failed. Never [`fp8_candle::Error::Candle`], which becomes [`Error::Candle`].
    #[error(transparent)]
    Fp8(fp8_candle::Error),
    /// The optimizer was given something that does not fit. Never an error of candle or of an FP8 operation, which become
    /// [`Error::Candle`] and [`Error::Fp8`].
    #[error(transparent)]
    Optim(OptimError),
    /// The files of a model cannot be read, written or rewritten. Never an error of candle or of an FP8 operation, which become
    /// [`Error::Candle`] and [`Error::Fp8`].
    #[error(transparent)]
    Files(fp8_files::Error),
    /// A batch norm in training has got too few values for a variance of each channel.
    #[error("{}: {shape:?} holds fewer than two values for a channel, which have no variance", layer.as_deref().unwrap_or("batch norm"))]
    NoVariance {
        /// Path of the layer, if it knows it.
        layer: Option<String>,
        /// What it has got.
        shape: Vec<usize>,
    },
    /// The checkpoint does not fit the run that is to be resumed.
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
    /// Gradients were asked for before a micro-batch was added.
    #[error("no micro-batch was added since the last step: there are no gradients to take")]
    NothingAccumulated,
    /// A micro-batch cannot count by this number.
    #[error("a micro-batch cannot weigh {weight}: expected a positive finite number")]
    MicroBatchWeight {
        /// The weight given.
        weight: f64,
    },
    /// The projections of an attention do not have the features of its heads.
    #[error(
        "attention with `{path}`: the projections of queries, keys and values give {got:?} features, its heads have {expected:?}"
    )]
    Heads {
        /// Path of the projection of results.
        path: String,
        /// Features that the heads have.
        expected: Vec<usize>,
        /// Features of the projections.
        got: Vec<usize>,
    },
    /// An option of a transformer module or an adapter, or an input of its call, does not fit the module.
    #[error("`{path}`: {what} is {got}, expected {expected}")]
    TransformerOption {
        /// Path of the module, or of one of its layers; empty if unknown.
        path: String,
        /// Which option or input.
        what: &'static str,
        /// What it is.
        got: String,
        /// What fits.
        expected: String,
    },
    /// A guard was opened on a worker of a rayon pool.
    #[error(
        "no autocast guard opens on worker {worker} of a rayon pool: while it waits it runs other tasks, which would see the \
         guard. Open it outside of the pool and carry it in with AutocastHandle::run, or use std threads"
    )]
    OnPoolWorker {
        /// Index of the worker in its pool.
        worker: usize,
    },
    /// A handle or an inner guard was used after the end of the guard it comes from.
    #[error(
        "the autocast guard that this context comes from is closed: its step has ended, open the handle or the inner guard \
         while it lives"
    )]
    GuardClosed,
    /// A function that is run again in the backward pass uses a layer that it has not used, or not as often, at first.
    #[error(
        "a checkpointed function uses layer `{path}` more often when it runs again than at first"
    )]
    NotRepeated {
        /// Path of the layer.
        path: String,
    },
    /// The system could not start a thread.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// A guard was opened by the destructor of a `thread_local` value, while its thread ends.
    #[error("no autocast guard opens on a thread that ends")]
    ThreadEnds,
    /// A layer has no state for a tensor that the recipe casts.
    #[error("layer `{path}` keeps no state for its {role}")]
    NoRole {
        /// Path of the layer.
        path: String,
        /// The tensor role.
        role: Role,
    },
    /// An operation that has no backward pass was applied to a tensor that tracks a gradient.
    #[error(
        "`{op}` has no backward pass: what lies before it would get no gradient. For inference load the model from a file or \
         detach its inputs"
    )]
    NoBackward {
        /// The operation.
        op: &'static str,
    },
    /// Export of a layer whose weight has changed since its calibration.
    #[error(
        "layer `{path}`: the weight has changed since calibration, which its scales no longer describe: calibrate again"
    )]
    ChangedSinceCalibration {
        /// Path of the layer.
        path: String,
    },
    /// Export of a layer that was not calibrated.
    #[error(
        "layer `{path}` was not calibrated: run at least one batch through it under a calibrating guard"
    )]
    NotCalibrated {
        /// Path of the layer.
        path: String,
    },
    /// Export to a file whose name does not end in `.safetensors`.
    #[error(
        "{path} is not a directory: an exported model goes into one, or to a name that ends in .safetensors"
    )]
    ExportPath {
        /// The path as given.
        path: PathBuf,
    },
    /// Export of a model that does not show all of its parameters.
    #[error(
        "the model has parameters that it does not show, so that they would be missing in the file: {}. \
        Fields with `#[fp8(skip)]` must hold none", .names.join(", ")
    )]
    MissedParameters {
        /// Names of the parameters.
        names: Vec<String>,
    },
    /// Export of a model without FP8 layers.
    #[error("no layer of the model is prepared for FP8: nothing to export")]
    NothingToExport,
    /// Quantization of a model without a linear layer that can compute in FP8.
    #[error("no layer of the model was prepared for FP8: nothing to quantize")]
    NothingToQuantize,
    /// Export of a tensor that has no name.
    #[error(
        "a tensor of shape {shape:?} has no path: give the export the VarMap that it comes from (ExportOptions::with_vars), \
         name it (nn::Parameter, with_path), or put `#[fp8(skip)]` on a field that is no parameter"
    )]
    Unnamed {
        /// Shape of the tensor.
        shape: Vec<usize>,
    },
    /// A number that is not the scale of a scaled tensor, or one that the file cannot hold.
    #[error("{path}: the scale of `{tensor}` is {value:e}, expected {expected}")]
    DataScale {
        /// The file.
        path: PathBuf,
        /// Name of the scaled tensor.
        tensor: String,
        /// The number.
        value: f32,
        /// What scales have to be.
        expected: &'static str,
    },
    /// Data without a scale or a scale without data, in a file of scaled tensors.
    #[error("{path} has a tensor `{tensor}` but no `{missing}`")]
    ScaledPair {
        /// The file.
        path: PathBuf,
        /// The tensor that is there.
        tensor: String,
        /// The one that is not.
        missing: String,
    },
    /// A layer was given a scaled input, and one of its parameters is a plain tensor.
    #[error(
        "`{tensor}` is a plain tensor: a layer computes on scaled tensors if it was built on the VarBuilder of a ScaledVarMap"
    )]
    NotScaled {
        /// Name of the parameter.
        tensor: String,
    },
    /// A layer that knows nothing of scales was built on scaled parameters.
    #[error(
        "`{path}` is {layer}, which has no scaled form and would take the data of its parameters for their values: build it on a VarBuilder of plain tensors"
    )]
    NoScaledForm {
        /// Kind of the layer.
        layer: &'static str,
        /// Its path.
        path: String,
    },
    /// A model with scaled parameters was given to a function that knows plain variables.
    #[error("`{tensor}` is a scaled parameter, which {function} cannot take: {instead}")]
    ScaledParameter {
        /// Name of the parameter.
        tensor: String,
        /// The function.
        function: &'static str,
        /// What to call in its place.
        instead: &'static str,
    },
}

impl From<fp8_candle::Error> for Error {
    fn from(error: fp8_candle::Error) -> Self {
        match error {
            fp8_candle::Error::Candle(error) => Self::Candle(error),
            other => Self::Fp8(other),
        }
    }
}

impl From<fp8_files::Error> for Error {
    fn from(error: fp8_files::Error) -> Self {
        match error {
            fp8_files::Error::Candle(error) => Self::Candle(error),
            fp8_files::Error::Fp8(error) => error.into(),
            other => Self::Files(other),
        }
    }
}

impl From<FileError> for Error {
    fn from(error: FileError) -> Self {
        Self::Files(error.into())
    }
}

impl From<OptimError> for Error {
    fn from(error: OptimError) -> Self {
        match error {
            OptimError::Candle(error) => Self::Candle(error),
            OptimError::Fp8(error) => error.into(),
            other => Self::Optim(other),
        }
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Fp8(error) => error.into(),
            Error::Optim(error) => error.into(),
            Error::Files(error) => error.into(),
            other => candle_core::Error::wrap(other),
        }
    }
}

impl From<std::convert::Infallible> for Error {
    fn from(never: std::convert::Infallible) -> Self {
        match never {}
    }
}

/// Result of this crate's own operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

fn near_text(near: &[String]) -> String {
    match near {
        [] => String::new(),
        near => format!("; did you mean {}?", near.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candle() -> candle_core::Error {
        candle_core::Error::Msg("from candle".into())
    }

    /// However an error of candle arrives, it is seen in one way.
    #[test]
    fn errors_of_candle_are_flattened() {
        let sources = [
            Error::from(candle()),
            fp8_candle::Error::from(candle()).into(),
            OptimError::from(candle()).into(),
            OptimError::from(fp8_candle::Error::from(candle())).into(),
        ];
        for error in sources {
            assert!(matches!(error, Error::Candle(_)), "{error:?}");
            assert!(matches!(error.into(), candle_core::Error::Msg(_)));
        }
    }

    #[test]
    fn errors_of_operations_keep_their_kind() {
        let operation = || fp8_candle::Error::NoRow { row: 4, rows: 2 };
        let sources = [
            Error::from(operation()),
            OptimError::from(operation()).into(),
        ];
        for error in sources {
            let text = operation().to_string();
            assert_eq!(error.to_string(), text);
            assert!(matches!(
                error,
                Error::Fp8(fp8_candle::Error::NoRow { row: 4, .. })
            ));
            // A backtrace may follow.
            let theirs = candle_core::Error::from(error).to_string();
            assert!(theirs.starts_with(&text), "{theirs}");
        }
    }
}
