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
    /// The queue is full: try again later.
    #[error("{waiting} requests are waiting already, the limit of the queue")]
    QueueFull {
        /// Waiting requests.
        waiting: usize,
    },
    /// The cache of one request would exceed the limit for all caches together.
    #[error(
        "a cache of {tokens} tokens takes {bytes} bytes, and the limit for all caches together is {limit}"
    )]
    CacheTooLarge {
        /// Tokens of the prompt, and those that may follow it.
        tokens: usize,
        /// Bytes of their keys and values.
        bytes: usize,
        /// The limit of the server.
        limit: usize,
    },
    /// A request needs a tokenizer, and the server has none.
    #[error(
        "{what} needs a tokenizer, but the server has none: start it with Server::with_tokenizer"
    )]
    NoTokenizer {
        /// What needs it.
        what: &'static str,
    },
    /// The server was shut down before the request ended.
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
