//! Errors of GGUF files.

use std::path::PathBuf;

/// An error of reading a GGUF file. Every message names the file.
///
/// ```
/// use fp8::models::gguf::{GgufError, GgufFile};
/// let error = GgufFile::open("none.gguf").unwrap_err();
/// assert!(matches!(error, GgufError::Io { .. }));
/// assert!(error.to_string().starts_with("none.gguf: "));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GgufError {
    /// The file cannot be read.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },

    /// The path is not a regular file but a directory, a named pipe or a device.
    #[error(transparent)]
    Unreadable(Box<fp8_files::Error>),

    /// The file is not a GGUF file, or it is malformed.
    #[error("{path}: {reason}", path = .path.display())]
    Broken {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// A tensor is stored in an unsupported type.
    #[error("{path}: tensor `{tensor}` is stored as {stored}, which is not supported", path = .path.display())]
    UnsupportedType {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The name of its type, and its number.
        stored: String,
    },

    /// The architecture is not supported.
    #[error(
        "{path}: the architecture is `{architecture}`; llama, mistral, qwen2 and qwen3 are read", path = .path.display()
    )]
    UnsupportedArchitecture {
        /// The file.
        path: PathBuf,
        /// `general.architecture`.
        architecture: String,
    },

    /// The model has a feature that an ordinary `config.json` cannot express.
    #[error("{path}: {what} is not supported", path = .path.display())]
    UnsupportedModel {
        /// The file.
        path: PathBuf,
        /// The feature, with its value.
        what: String,
    },

    /// A metadata entry is missing or has the wrong type.
    #[error("{path}: the entry `{key}` is {value}, expected {expected}", path = .path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// Its value, or `missing`.
        value: String,
        /// What it should be.
        expected: &'static str,
    },

    /// A tensor does not belong to the architecture.
    #[error("{path}: tensor `{tensor}` does not belong to a {architecture} model", path = .path.display())]
    UnknownTensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// The architecture.
        architecture: &'static str,
    },

    /// A tensor is missing, or its shape disagrees with the metadata.
    #[error("{path}: tensor `{tensor}` has shape {actual:?}, expected {expected}", path = .path.display())]
    Shape {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// Its shape, outermost first; empty if it is missing.
        actual: Vec<usize>,
        /// What it should be.
        expected: String,
    },

    /// The tokenizer is of an unsupported kind.
    #[error("{path}: the tokenizer's `{key}` is `{value}`; {known} are read", path = .path.display())]
    UnsupportedTokenizer {
        /// The file.
        path: PathBuf,
        /// The entry that says so.
        key: &'static str,
        /// Its value.
        value: String,
        /// The supported values.
        known: &'static str,
    },

    /// candle could not read or convert a tensor.
    #[error("{path}: tensor `{tensor}`: {source}", path = .path.display())]
    Tensor {
        /// The file.
        path: PathBuf,
        /// The tensor's name in the file.
        tensor: String,
        /// candle's own error.
        source: Box<candle_core::Error>,
    },
}
