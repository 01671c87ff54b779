//! Errors of models: one enum for models, and one each for GGUF files, the hub and text.

mod gguf;
#[cfg(feature = "hub")]
mod hub;
mod text;

pub use gguf::GgufError;
#[cfg(feature = "hub")]
pub use hub::HubError;
pub use text::TextError;

use std::path::PathBuf;

/// An error of configuring, opening or running a model.
///
/// ```
/// use fp8::models::{Error, ModelOptions, open};
/// match open("no/such/directory", &ModelOptions::new()) {
///     Err(Error::Fp8(error)) => assert!(error.to_string().contains("no/such/directory")),
///     other => panic!("{other:?}"),
/// }
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// Text or generation.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A model of the hub.
    #[cfg(feature = "hub")]
    #[error(transparent)]
    Hub(#[from] HubError),
    /// A recipe, a layer or a checkpoint.
    #[error(transparent)]
    Fp8(#[from] crate::Error),
    /// An entry of a model's configuration is missing or has an unsupported value.
    #[error("{}: {key} is {value}, expected {expected}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// Its value, or `missing`.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// An encoder without a classifier was asked to classify.
    #[error("the model has no classifier: it gives features of texts")]
    NoClassifier,
    /// The classes of an adapter differ from those of the model.
    #[error(
        "the model has the classes {model}, and the adapter has {adapter}: `remove_classifier` makes room for another classifier"
    )]
    OtherClasses {
        /// Names of the model's classes.
        model: String,
        /// Names of the adapter's classes, or their number.
        adapter: String,
    },
    /// A model holds no adapter of this name.
    #[error("there is no adapter `{name}`; there are: {adapters}")]
    NoAdapter {
        /// The name.
        name: String,
        /// The names of those that it holds.
        adapters: String,
    },
    /// A model already holds an adapter of this name.
    #[error("there is already an adapter `{name}`")]
    AdapterExists {
        /// The name.
        name: String,
    },
    /// The weights have the updates of an adapter already: it was merged, under this name or another one.
    #[error("the weights have the updates of the adapter `{name}` already: they would count twice")]
    AdapterMerged {
        /// The name.
        name: String,
    },
    /// Matrices of a new adapter would be variables that something else has, such as another adapter.
    #[error(
        "the adapter `{name}` cannot have the variable `{variable}`, which exists already: give each adapter a `VarMap` or a prefix of its own"
    )]
    AdapterVariable {
        /// The name of the adapter.
        name: String,
        /// The name of the variable, or the path of its layer.
        variable: String,
    },
    /// More tokens than a cache has room for.
    #[error(
        "the cache holds {len} tokens of at most {capacity}: there is no room for {tokens} more"
    )]
    CacheFull {
        /// Tokens in the cache.
        len: usize,
        /// Tokens to add.
        tokens: usize,
        /// Tokens that it can hold.
        capacity: usize,
    },
    /// Not enough memory for a cache.
    #[error("no memory for a cache of {batch} sequences of {capacity} tokens")]
    CacheMemory {
        /// Sequences.
        batch: usize,
        /// Tokens of each.
        capacity: usize,
    },
    /// A cache belongs to another model or another batch.
    #[error("the cache is for {what} {got}, expected {expected}")]
    CacheMismatch {
        /// What differs.
        what: &'static str,
        /// The cache's.
        got: String,
        /// The call's.
        expected: String,
    },
    /// The samples cannot be used for a search.
    #[error("samples to search on: {reason}")]
    Samples {
        /// What is wrong with them.
        reason: String,
    },
    /// Codes cannot be searched for a layer.
    #[error("layer `{path}` {reason}")]
    NotSearchable {
        /// Path of the layer.
        path: String,
        /// Why not, and what to do.
        reason: &'static str,
    },
    /// A token id is not in the vocabulary, or ids are not `[batch, tokens]` of integers.
    #[error("token ids: {reason}")]
    TokenIds {
        /// What is wrong with them.
        reason: String,
    },
}

impl From<fp8_files::Error> for Error {
    fn from(error: fp8_files::Error) -> Self {
        Self::Fp8(error.into())
    }
}

impl From<crate::fp8_candle::Error> for Error {
    fn from(error: crate::fp8_candle::Error) -> Self {
        Self::Fp8(error.into())
    }
}

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            other => candle_core::Error::wrap(other),
        }
    }
}

/// The result of this module's functions.
pub type Result<T> = std::result::Result<T, Error>;
