//! Errors of downloads from the hub.

use hf_hub::api::sync::ApiError;
use std::path::PathBuf;

/// An error of downloading a model from the hub.
///
/// ```
/// use fp8::models::hub::{self, HubError, HubOptions};
/// let error = hub::cached("../secrets", &HubOptions::default().with_cache_dir("cache"));
/// assert!(matches!(error, Err(HubError::Name { .. })));
/// ```
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// Invalid name of a model or a revision.
    #[error("{name:?} is not a valid {what}")]
    Name {
        /// `model of the hub, expected OWNER/NAME`, or `revision`.
        what: &'static str,
        /// The name.
        name: String,
    },

    /// There is no directory for the cache.
    #[error("there is neither HF_HOME nor a home directory for the cache")]
    NoCache,

    /// The model has no safetensors files.
    #[error("{model} has no safetensors files")]
    NoWeights {
        /// The model.
        model: String,
    },

    /// An index is malformed.
    #[error("{path}: {reason}", path = .path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },

    /// A download failed.
    #[error("{model}: cannot get {file}: {source}")]
    Download {
        /// The model.
        model: String,
        /// The file.
        file: String,
        /// What hf-hub says.
        source: Box<ApiError>,
    },
}
