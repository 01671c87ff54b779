//! What can be chosen of the files that a rewrite makes, and what it reports.

use std::path::PathBuf;

/// The size of a shard as Hugging Face's libraries have it: 5 GB.
const SHARD_BYTES: u64 = 5_000_000_000;

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
    /// Bytes of tensors in one file, unless one layer alone has more. Default 5 GB.
    pub shard_bytes: u64,
    /// Whether a model that stands in the target directory is replaced, with everything else in that directory. Default no.
    pub overwrite: bool,
    /// Whether scales of KV caches, and of queries and probabilities in FP8 attention, are left out, which a target may be
    /// unable to say. Default no.
    pub drop_kv_scales: bool,
    /// Of [`convert`](super::convert): whether layers of the source whose input scales are powers of two are announced as such in the
    /// target's metadata, which this library alone reads, where the family's configuration cannot say it. Default no: they get exact
    /// scales, as every engine gives them.
    pub power_of_two_inputs: bool,
}

impl Default for WriteOptions {
    fn default() -> Self {
        Self {
            shard_bytes: SHARD_BYTES,
            overwrite: false,
            drop_kv_scales: false,
            power_of_two_inputs: false,
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
}

/// What a rewrite has written.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use fp8_recipes::load::Checkpoint;
/// # use fp8_recipes::rewrite::{self, QuantizeOptions, Scheme};
/// # let dir = tempfile::tempdir()?;
/// # let weight = Tensor::ones((32, 64), DType::F32, &Device::Cpu)?;
/// # let bias = Tensor::zeros(32, DType::F32, &Device::Cpu)?;
/// # let tensors = [("fc.weight", weight), ("fc.bias", bias)].into();
/// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
/// # let (model, fp8) = (Checkpoint::open_dir(dir.path())?, dir.path().join("fp8"));
/// # rewrite::quantize(&model, &fp8, &QuantizeOptions::new(Scheme::ChannelToken), &mut rewrite::quiet)?;
/// let options = QuantizeOptions::new(Scheme::ChannelToken).with_ignore(["head*"]);
/// let target = dir.path().join("again");
/// let report = rewrite::quantize(&model, &target, &options, &mut rewrite::quiet)?;
/// assert_eq!(report.directory, target);
/// assert_eq!(report.quantized, ["fc"]);
/// assert_eq!(report.unmatched, ["head*"]); // a pattern that is mistyped, perhaps
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteReport {
    /// The directory.
    pub directory: PathBuf,
    /// Names of the files in it, sorted.
    pub files: Vec<String>,
    /// Paths of the layers in FP8.
    pub quantized: Vec<String>,
    /// Those of them that were FP8 before: their values are rounded a second time.
    pub requantized: Vec<String>,
    /// Paths of the linear layers in high precision.
    pub ignored: Vec<String>,
    /// Paths of the layers in FP8 whose input scales are powers of two in the source and exact in what was written, because the target's
    /// configuration cannot say it: see [`WriteOptions::power_of_two_inputs`].
    pub exact_inputs: Vec<String>,
    /// Patterns of layers to ignore that no linear layer has met.
    pub unmatched: Vec<String>,
    /// Bytes of all tensors.
    pub bytes: u64,
}
