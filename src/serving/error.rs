//! Errors of serving.

use crate::models::{Error, TextError};
use std::sync::Arc;

/// Why a request was refused or has ended early. Clones share the error of a model, which may end several requests at once.
///
/// ```
/// use fp8::serving::{ServerOptions, ServingError};
/// let error = ServerOptions::default().with_max_running(0).check().unwrap_err();
/// assert!(matches!(error, ServingError::Option { option: "max_running", .. }));
/// ```
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum ServingError {
    /// An option of the server has an invalid value.
    #[error("{option} is {value}: expected {expected}")]
    Option {
        /// The option's name.
        option: &'static str,
        /// Its value.
        value: usize,
        /// The values that it can have.
        expected: &'static str,
    },
    /// As many requests wait as may wait: try again later.
    #[error("{waiting} requests wait already, as many as may wait")]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
    },
    /// The cache of a request would be larger than those of all requests may be together.
    #[error(
        "a cache of {tokens} tokens has {bytes} bytes, and all caches together may have {limit}"
    )]
    CacheTooLarge {
        /// Tokens of the prompt and those that may follow.
        tokens: usize,
        /// Bytes of their keys and values.
        bytes: usize,
        /// The limit of the server.
        limit: usize,
    },
    /// A request needs a tokenizer, and the server has none.
    #[error(
        "{what} needs a tokenizer, and the server has none: start it with Server::with_tokenizer"
    )]
    NoTokenizer {
        /// What needs it.
        what: &'static str,
    },
    /// The server was shut down before the request had ended.
    #[error("the server was shut down")]
    ShutDown,
    /// The model panicked while it computed a token of this request.
    #[error("the model panicked: {message}")]
    Panicked {
        /// The message of the panic.
        message: String,
    },
    /// The request is invalid, or the model failed while it computed a token of this request.
    #[error(transparent)]
    Model(Arc<Error>),
    /// The server's thread could not be started.
    #[error("the server's thread could not be started: {reason}")]
    Thread {
        /// The system's message.
        reason: String,
    },
}

impl From<Error> for ServingError {
    fn from(error: Error) -> Self {
        Self::Model(error.into())
    }
}

impl From<TextError> for ServingError {
    fn from(error: TextError) -> Self {
        Error::from(error).into()
    }
}
