//! What can be chosen of the files that a rewrite makes, and what it reports.

use std::path::PathBuf;

/// The size of a shard as Hugging Face's libraries have it: 5 GB.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Options of every rewrite.
///
/// ```
/// use fp8_recipes::rewrite::WriteOptions;
/// let options = WriteOptions::new().with_shard_bytes(1 << 30).with_overwrite(true);
/// assert_eq!(options.shard_bytes, 1 << 30);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteOptions {
    /// Bytes of tensors in one file, unless one layer alone has more. Default 5 GB.
    pub shard_bytes: u64,
    /// Whether a model that stands in the target directory is replaced, with everything else in that directory. Default no.
    pub overwrite: bool,
    /// Whether scales of KV caches, and of queries and probabilities in FP8 attention, are left out, which a target may be
    /// unable to say. Default no.
    pub drop_kv_scales: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            shard_bytes: SHARD_BYTES,
            overwrite: false,
            drop_kv_scales: false,
        }
    }
}

impl WriteOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// See [`WriteOptions::shard_bytes`].
    #[must_use]
    pub fn with_shard_bytes(mut self, bytes: u64) -> Self {
        self.shard_bytes = bytes;
        self
    }

    /// See [`WriteOptions::overwrite`].
    #[must_use]
    pub fn with_overwrite(mut self, overwrite: bool) -> Self {
        self.overwrite = overwrite;
        self
    }

    /// See [`WriteOptions::drop_kv_scales`].
    #[must_use]
    pub fn with_drop_kv_scales(mut self, drop: bool) -> Self {
        self.drop_kv_scales = drop;
        self
    }
}

/// What a rewrite has written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteReport {
    /// The directory.
    pub directory: PathBuf,
    /// Names of the files in it, sorted.
    pub files: Vec<String>,
    /// Paths of the layers in FP8.
    pub quantized: Vec<String>,
    /// Paths of the linear layers in high precision.
    pub ignored: Vec<String>,
    /// Patterns of layers to ignore that no linear layer has met.
    pub unmatched: Vec<String>,
    /// Bytes of all tensors.
    pub bytes: u64,
}
