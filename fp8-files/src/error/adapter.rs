//! Errors of adapters.

use std::path::PathBuf;

/// An adapter does not fit its base model, or its files do not fit each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AdapterError {
    /// A target matches no linear layer.
    #[error("the target `{target}` matches no linear layer; there are: {layers}")]
    NoTarget {
        /// The name or expression.
        target: String,
        /// The last components of the paths of all linear layers.
        layers: String,
    },
    /// Two patterns of the configuration give a layer different values. PEFT takes the first in the file.
    #[error(
        "layer `{path}`: the patterns `{first}` and `{second}` give it {values}, expected one value: remove one of them, or say the same"
    )]
    Ambiguous {
        /// Path of the layer.
        path: String,
        /// One pattern.
        first: String,
        /// The other.
        second: String,
        /// Both values.
        values: String,
    },
    /// Layers that the configuration targets lack matrices in the file.
    #[error("{}: {} tensors of layers that the targets name are missing, the first is `{}`", path.display(), missing.len(),
        missing.first().map_or("", String::as_str))]
    Missing {
        /// The file of tensors.
        path: PathBuf,
        /// Names of the missing tensors.
        missing: Vec<String>,
    },
    /// The file holds tensors that belong to no targeted layer of the base.
    #[error("{}: {} tensors belong to no targeted linear layer of the base, the first is `{}`", path.display(), extra.len(),
        extra.first().map_or("", String::as_str))]
    Extra {
        /// The file of tensors.
        path: PathBuf,
        /// Names of the tensors.
        extra: Vec<String>,
    },
    /// The adapter was merged into the base before.
    #[error("{}: the weights of the base have the updates of this adapter already", path.display())]
    Merged {
        /// The file of tensors.
        path: PathBuf,
    },
}
