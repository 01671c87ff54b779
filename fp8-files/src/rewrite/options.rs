//! Options and report of a rewrite.

use std::collections::BTreeMap;
use std::path::PathBuf;

/// The size of a shard in Hugging Face's libraries: 5 GB.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Memory for tensors: 1 GiB.
const MEMORY: u64 = 1 << 30;

/// Options of every rewrite.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::rewrite::WriteOptions;
/// let options = WriteOptions::new().with_shard_bytes(1 << 30).with_overwrite(true);
/// assert_eq!(options.shard_bytes, 1 << 30);
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteOptions {
    /// The largest number of bytes of tensors in one file, unless a single layer has more. Default 5 GB.
    pub shard_bytes: u64,
    /// Whether to replace a model in the target directory, with everything else in that directory. Default no.
    pub overwrite: bool,
    /// Whether to leave out scales of KV caches and of queries and probabilities in FP8 attention, for targets that cannot hold them.
    /// Default no.
    pub drop_kv_scales: bool,
    /// For [`convert`](super::convert) into a family whose configuration has no key for input scales that are powers of two: whether to
    /// list the layers that have them in the target's metadata, which only this library reads. Default no: they get exact scales, which
    /// every engine computes.
    pub power_of_two_inputs: bool,
    /// How many layers are processed at once; 0, the default, means as many as the machine has processors. The files are the same for any
    /// number.
    pub threads: usize,
    /// The largest number of bytes for the tensors of all these layers together, unless a single layer needs more. Default 1 GiB.
    pub memory: u64,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            shard_bytes: SHARD_BYTES,
            overwrite: false,
            drop_kv_scales: false,
            power_of_two_inputs: false,
            threads: 0,
            memory: MEMORY,
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

    /// See [`WriteOptions::power_of_two_inputs`].
    #[must_use]
    pub fn with_power_of_two_inputs(mut self, announce: bool) -> Self {
        self.power_of_two_inputs = announce;
        self
    }

    /// See [`WriteOptions::threads`].
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// See [`WriteOptions::memory`].
    #[must_use]
    pub fn with_memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }
}

/// What a rewrite wrote.
///
/// ```
/// use fp8_recipes::load::Checkpoint;
/// use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
/// # let dir = tempfile::tempdir()?;
/// # fp8_test_support::files::plain_model(dir.path());
/// let model = Checkpoint::open_dir(dir.path())?;
/// let options = QuantizeOptions::new(Scheme::ChannelToken).with_ignore(["head*"]);
/// let target = dir.path().join("fp8");
/// let report = rewrite::quantize(&model, &target, &options, &mut rewrite::quiet)?;
/// assert_eq!(report.directory, target);
/// assert_eq!(report.quantized, ["fc"]);
/// assert_eq!(report.unmatched, ["head*"]); // a pattern that is mistyped, perhaps
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct WriteReport {
    /// The directory.
    pub directory: PathBuf,
    /// Names of the files in it, sorted.
    pub files: Vec<String>,
    /// Paths of the layers in FP8.
    pub quantized: Vec<String>,
    /// Paths of the layers that were FP8 before, whose values were rounded a second time.
    pub requantized: Vec<String>,
    /// The largest relative error of that second rounding over these layers: the norm of the difference of a weight over the norm of
    /// the weight in the source. None if there are no such layers.
    pub requantization_error: Option<f32>,
    /// By the path of a layer that was FP8 before and has an update, as in [`Merged`](super::Merged): how far rounding has changed the
    /// update, which is the norm of the difference between the weight as written and the sum of weight and update, over the norm of the
    /// update. 1 if all of a small update is lost.
    pub update_errors: BTreeMap<String, f32>,
    /// Paths of the linear layers in high precision.
    pub ignored: Vec<String>,
    /// Paths of the weights that are FP8 in the source and in high precision here. After [`convert`](super::convert) these are tables of
    /// embeddings and routers of experts.
    pub dequantized: Vec<String>,
    /// Paths of the layers in FP8 that vLLM does not read as such in this spelling: see
    /// [`Spelling::unread_by_vllm`](crate::rewrite::Spelling::unread_by_vllm).
    pub unread_by_vllm: Vec<String>,
    /// Paths of the layers in FP8 whose input scales are powers of two in the source and exact in the target, whose configuration has no
    /// key for it: see [`WriteOptions::power_of_two_inputs`].
    pub exact_inputs: Vec<String>,
    /// Patterns of layers to ignore that match no linear layer.
    pub unmatched: Vec<String>,
    /// Bytes of all tensors.
    pub bytes: u64,
}
