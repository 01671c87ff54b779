//! One enum of errors for each room, and [`Error`], which wraps them.

mod dense;
mod export;
mod guard;
mod layer;
mod training_checkpoint;

pub use dense::DenseError;
pub use export::ExportError;
pub use guard::GuardError;
pub use layer::LayerError;
pub use training_checkpoint::TrainingCheckpointError;

use crate::config::ConfigError;
use crate::optim::OptimError;
use fp8_files::atomic::FileError;
use std::path::Path;

/// What can go wrong outside a tensor operation.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A recipe or configuration is unknown or inconsistent.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A guard or handle was misused.
    #[error(transparent)]
    Guard(#[from] GuardError),
    /// A layer cannot be built, called or folded.
    #[error(transparent)]
    Layer(#[from] LayerError),
    /// A dense layer with any axes cannot be built or called.
    #[error(transparent)]
    Dense(Box<DenseError>),
    /// A model cannot be quantized or exported.
    #[error(transparent)]
    Export(#[from] ExportError),
    /// A training checkpoint cannot be resumed.
    #[error(transparent)]
    TrainingCheckpoint(#[from] TrainingCheckpointError),
    /// An operation of candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// An FP8 operation failed. Never [`fp8_candle::Error::Candle`], which becomes [`Error::Candle`].
    #[error(transparent)]
    Fp8(fp8_candle::Error),
    /// An operation of scaled arithmetic failed. Never [`fp8_scaled::Error::Fp8`] or `Files`, which become [`Error::Fp8`] or [`Error::Candle`].
    #[error(transparent)]
    Scaled(Box<fp8_scaled::Error>),
    /// The optimizer was given something that does not fit. Never an error of candle or of an FP8 operation, which become
    /// [`Error::Candle`] and [`Error::Fp8`].
    #[error(transparent)]
    Optim(OptimError),
    /// The files of a model cannot be read, written or rewritten. Never an error of candle or of an FP8 operation, which become
    /// [`Error::Candle`] and [`Error::Fp8`].
    #[error(transparent)]
    Files(fp8_files::Error),
    /// A group of ranks failed.
    #[error(transparent)]
    Ranks(#[from] fp8_ranks::Error),
    /// A layer was given a scaled input, and one of its parameters is a plain tensor.
    #[error(
        "`{tensor}` is a plain tensor: a layer computes on scaled tensors if it was built on the VarBuilder of a ScaledVarMap"
    )]
    NotScaled {
        /// Name of the parameter.
        tensor: String,
    },
    /// A layer without a scaled form was built on scaled parameters.
    #[error(
        "`{path}` is {layer}, which has no scaled form and would take the data of its parameters for their values: build it on a VarBuilder of plain tensors"
    )]
    NoScaledForm {
        /// Kind of the layer.
        layer: &'static str,
        /// Its path.
        path: String,
    },
    /// A model with scaled parameters was given to a function for plain variables.
    #[error("`{tensor}` is a scaled parameter, which {function} cannot take: {instead}")]
    ScaledParameter {
        /// Name of the parameter.
        tensor: String,
        /// The function.
        function: &'static str,
        /// What to call in its place.
        instead: &'static str,
    },
    /// A model whose parameters lie in parts on several ranks was given to a function for whole parameters.
    #[error(
        "`{tensor}` lies in parts on several ranks, which {function} cannot take: save with `checkpoint::save_sharded`, or with \
         `checkpoint::save_gathered` for whole parameters, and resume with `checkpoint::resume_sharded`"
    )]
    ShardedParameter {
        /// Name of the parameter.
        tensor: String,
        /// The function.
        function: &'static str,
    },
}

impl From<DenseError> for Error {
    fn from(error: DenseError) -> Self {
        Self::Dense(error.into())
    }
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

impl From<fp8_scaled::Error> for Error {
    fn from(error: fp8_scaled::Error) -> Self {
        match error {
            fp8_scaled::Error::Fp8(error) => error.into(),
            fp8_scaled::Error::Files(error) => error.into(),
            other => Self::Scaled(other.into()),
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
            OptimError::Scaled(error) => (*error).into(),
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
            Error::Scaled(error) => (*error).into(),
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

/// The error for a file at `path` that should hold `what` as JSON.
pub(crate) fn json_error(path: &Path, what: &'static str, reason: impl ToString) -> Error {
    Error::Files(fp8_files::Error::Json {
        path: path.to_path_buf(),
        what,
        reason: reason.to_string(),
    })
}

/// Result of this crate's own operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;

#[cfg(test)]
mod tests {
    use super::*;

    fn candle() -> candle_core::Error {
        candle_core::Error::Msg("from candle".into())
    }

    /// Errors of candle become the same variant, whatever wraps them.
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
