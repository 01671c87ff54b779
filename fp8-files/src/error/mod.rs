//! Errors of model files.

mod adapter;
mod file_kind;
mod shown;

pub use adapter::AdapterError;
pub use file_kind::FileKind;

use crate::atomic::FileError;
use crate::names::PatternError;
use crate::spelling::Spelling;
use shown::{in_file, unmatched};
use std::path::{Path, PathBuf};

/// An error with the files of a model.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An operation of candle failed.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// An FP8 operation failed. Never [`fp8_candle::Error::Candle`], which becomes [`Error::Candle`].
    #[error(transparent)]
    Fp8(fp8_candle::Error),
    /// A pattern of layer paths is malformed.
    #[error(transparent)]
    Malformed(#[from] PatternError),
    /// An adapter does not fit.
    #[error(transparent)]
    Adapter(#[from] AdapterError),
    /// A file could not be written.
    #[error(transparent)]
    Write(#[from] FileError),
    /// A file could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The path to read is not a regular file. It was not opened.
    #[error("cannot read {path}: it is a {kind}, not a regular file")]
    NotARegularFile {
        /// The path.
        path: PathBuf,
        /// The kind of file that is there.
        kind: FileKind,
    },
    /// A file is larger than any valid file of its kind.
    #[error("cannot read {path}: it is longer than {limit} bytes")]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The largest size that is read, in bytes.
        limit: u64,
    },
    /// A file is not a valid safetensors file.
    #[error("{path} is not a valid safetensors file: {reason}")]
    NotSafetensors {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A JSON file or metadata entry does not parse.
    #[error("{path}: {what} is not valid: {reason}")]
    Json {
        /// The file.
        path: PathBuf,
        /// Which part of it.
        what: &'static str,
        /// The parser's error.
        reason: String,
    },
    /// A configuration describes a quantization or an adapter that this library cannot load.
    #[error("{path}: `{key}` is {value}, which cannot be loaded; expected {expected}")]
    UnsupportedScheme {
        /// The configuration.
        path: PathBuf,
        /// The keys that lead to the value, with dots between them.
        key: String,
        /// The value, as JSON; `null` if there is none.
        value: String,
        /// The values that can be loaded.
        expected: String,
    },
    /// A configuration and the file beside it disagree about a layer.
    #[error("layer `{layer}`: {path} {says}, but {found}")]
    SchemeMismatch {
        /// Path of the layer.
        layer: String,
        /// The configuration.
        path: PathBuf,
        /// What it declares for the layer.
        says: String,
        /// What the file holds.
        found: String,
    },
    /// Matching a pattern of a configuration with a layer failed.
    #[error("the pattern `{pattern}` cannot be matched with layer `{layer}`: {reason}")]
    Pattern {
        /// The regular expression.
        pattern: String,
        /// Path of the layer.
        layer: String,
        /// The matcher's error.
        reason: String,
    },
    /// An FP8 weight has no scale.
    #[error(
        "tensor `{tensor}` holds FP8 values but there is no `{missing}` to scale them with{}",
        in_file(path)
    )]
    MissingScale {
        /// Name of the weight.
        tensor: String,
        /// Name of the missing tensor.
        missing: String,
        /// The file that holds the weight, if it is known.
        path: Option<PathBuf>,
    },
    /// Two tensors of a checkpoint have the same canonical name.
    #[error("{path}: both `{first}` and `{second}` stand for `{tensor}`, expected one")]
    Ambiguous {
        /// The file of the second one.
        path: PathBuf,
        /// The canonical name of both.
        tensor: String,
        /// Name of one in its file.
        first: String,
        /// Name of the other.
        second: String,
    },
    /// A tensor belongs to a format that this library does not read.
    #[error(
        "{path}: `{tensor}` belongs to {format}, which cannot be loaded; expected FP8 (F8_E4M3) weights"
    )]
    ForeignFormat {
        /// The file.
        path: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The format.
        format: String,
    },
    /// A directory holds no checkpoint.
    #[error("{path} holds no checkpoint: {reason}")]
    NoCheckpoint {
        /// The directory.
        path: PathBuf,
        /// What was expected and found.
        reason: String,
    },
    /// The index of a checkpoint does not fit its files.
    #[error("{path}: `{entry}` {reason}")]
    Index {
        /// The index.
        path: PathBuf,
        /// The tensor or file in the index.
        entry: String,
        /// What is wrong with it.
        reason: String,
    },
    /// A tensor has the wrong dtype.
    #[error("tensor `{tensor}` has dtype {got}, expected {expected}")]
    TensorDType {
        /// Name of the tensor.
        tensor: String,
        /// Dtype found.
        got: String,
        /// The dtypes that work.
        expected: String,
    },
    /// A VarBuilder was requested with a dtype that cannot hold the values.
    #[error("the values of a checkpoint cannot be held as {}: expected f32, bf16, f16 or f64", .got.as_str())]
    BuilderDType {
        /// The dtype requested.
        got: candle_core::DType,
    },
    /// A tensor has the wrong shape.
    #[error("tensor `{tensor}` has shape {got:?}, expected {expected}")]
    TensorShape {
        /// Name of the tensor.
        tensor: String,
        /// Shape found.
        got: Vec<usize>,
        /// The shapes that work.
        expected: String,
    },
    /// A tensor holds a number that is not allowed.
    #[error("tensor `{tensor}` holds {value:e} at index {index}, expected it to be {expected}")]
    TensorValue {
        /// Name of the tensor.
        tensor: String,
        /// Which element, counted in row-major order.
        index: usize,
        /// Its value.
        value: f64,
        /// What the numbers of this tensor must be.
        expected: String,
    },
    /// A required tensor is missing.
    #[error("{place} has no tensor `{tensor}`")]
    MissingTensor {
        /// Name of the tensor.
        tensor: String,
        /// Where it was expected.
        place: String,
    },
    /// Variables without a tensor in the checkpoint, or tensors without a variable.
    #[error(
        "the names of variables and checkpoint do not match: {}",
        unmatched(missing, unused)
    )]
    UnmatchedNames {
        /// Variables without a tensor; empty if they are allowed.
        missing: Vec<String>,
        /// Tensors without a variable; empty if they are allowed.
        unused: Vec<String>,
    },
    /// The header of a file has the same name twice, so it is ambiguous.
    #[error("{path} names `{name}` twice in its header")]
    RepeatedName {
        /// The file.
        path: PathBuf,
        /// The tensor or metadata entry.
        name: String,
    },
    /// Two files name the same tensor.
    #[error("tensor `{tensor}` is in {first} and in {second}")]
    DuplicateTensor {
        /// Name of the tensor.
        tensor: String,
        /// First file.
        first: PathBuf,
        /// Second file.
        second: PathBuf,
    },
    /// Two different tensors have one name.
    #[error("two different tensors are named `{tensor}`")]
    NameClash {
        /// The name.
        tensor: String,
    },
    /// A tied variable has different values under its two names.
    #[error(
        "`{first}` and `{second}` are one variable, but the checkpoint has different values for them: build the model without \
         the tie"
    )]
    TiedValues {
        /// One name of the variable.
        first: String,
        /// The other.
        second: String,
    },
    /// A layer cannot be exported in the file format.
    #[error("layer `{path}` cannot be exported: {reason}")]
    NotExportable {
        /// Path of the layer.
        path: String,
        /// The reason.
        reason: String,
    },
    /// The target's files cannot hold a layer, or the scales of a cache. Nothing was written.
    #[error("layer `{layer}` has {has}, which {spelling} files cannot hold: they take {takes}")]
    Inexpressible {
        /// Path of the layer.
        layer: String,
        /// Its granularity and input scaling.
        has: String,
        /// The target's family.
        spelling: Spelling,
        /// What its files can hold.
        takes: &'static str,
    },
    /// A rewrite of Mistral's own files, whose `params.json` lacks entries that `config.json` needs.
    #[error(
        "{path}: there is params.json but no config.json, so `architectures` and `model_type` of the new config.json are \
         missing; expected a config.json that says them"
    )]
    MissingConfig {
        /// The directory of the model.
        path: PathBuf,
    },
    /// The model has no layer to rewrite.
    #[error(
        "there is no layer to rewrite: the model has no FP8 weights to convert, or no linear layers to quantize"
    )]
    NothingToConvert,
    /// The weights of a model's linear layers are transposed.
    #[error(
        "a model whose model_type is `{model_type}` has weights of [in, out] (transformers' Conv1D), expected [out, in]: FP8 files have \
         no form for them"
    )]
    TransposedWeights {
        /// The entry of the configuration.
        model_type: String,
    },
    /// No good codes can be found for a layer on these samples.
    #[error(
        "layer `{path}`: the search has failed: {reason}; leave it in high precision, or search on other or more samples"
    )]
    Search {
        /// Path of the layer.
        path: String,
        /// What is wrong.
        reason: String,
    },
    /// The progress callback cancelled a rewrite. Nothing was written.
    #[error("cancelled; nothing was written")]
    Cancelled,
    /// The target of a rewrite exists.
    #[error("{path} {reason}")]
    TargetExists {
        /// The target.
        path: PathBuf,
        /// Why it cannot be replaced; the message has it after the path.
        reason: &'static str,
    },
    /// Codes were given for a layer that is not quantized.
    #[error(
        "codes were given for layer `{path}`, which is not among the layers to quantize: {layers}"
    )]
    CodesOfNoLayer {
        /// Path of the layer.
        path: String,
        /// How many layers are quantized, and the first of them.
        layers: String,
    },
    /// A static scheme lacks the amax of a layer's inputs.
    #[error(
        "layer `{path}` has no input amax, which static scales are made of: calibrate it or choose a dynamic scheme"
    )]
    MissingAmax {
        /// Path of the layer.
        path: String,
    },
}

impl Error {
    /// For [`Result::map_err`]: the file at `path` could not be read.
    pub(crate) fn read(path: &Path) -> impl Fn(std::io::Error) -> Self + use<> {
        let path = path.to_path_buf();
        move |source| Self::Read {
            path: path.clone(),
            source,
        }
    }

    /// A part of the file at `path` is malformed JSON.
    pub(crate) fn json(path: &Path, what: &'static str, reason: impl ToString) -> Self {
        Self::Json {
            path: path.to_path_buf(),
            what,
            reason: reason.to_string(),
        }
    }

    /// The layer at `path` cannot be exported.
    pub(crate) fn not_exportable(path: &str, reason: impl Into<String>) -> Self {
        Self::NotExportable {
            path: path.to_string(),
            reason: reason.into(),
        }
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

impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            Error::Fp8(error) => error.into(),
            other => candle_core::Error::wrap(other),
        }
    }
}

/// Result of this crate's own operations.
pub type Result<T, E = Error> = std::result::Result<T, E>;
