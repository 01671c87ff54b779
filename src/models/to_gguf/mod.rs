//! Writes a model of any family as a GGUF file, as llama.cpp's own converter does.

mod encode;
mod file;
mod metadata;
mod names;
mod plan;
mod rope;
mod tokenizer;
mod vocabulary;

use super::error::{Error, GgufError, Result};
use super::families::Config;
use super::setters::setters;
use crate::rewrite::{OnProgress, Source};
use names::Architecture;
use serde_json::Value;
use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// How the matrices of a GGUF file are stored. Norms, biases, routers of experts and position tables are f32 in any case.
///
/// ```
/// use fp8::models::gguf::GgufType;
/// assert_eq!("q8_0".parse::<GgufType>()?, GgufType::Q8_0);
/// # Ok::<(), String>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum GgufType {
    /// f32.
    F32,
    /// f16.
    F16,
    /// bf16.
    BF16,
    /// Blocks of 32 values: a scale in f16, which is the block's amax / 127, and whole numbers from -127 to 127. Matrices whose rows
    /// do not divide into blocks become f16, as in llama.cpp.
    #[default]
    Q8_0,
}

impl GgufType {
    const ALL: [(Self, &'static str, u32); 4] = [
        (Self::F32, "f32", 0),
        (Self::F16, "f16", 1),
        (Self::BF16, "bf16", 32),
        (Self::Q8_0, "q8_0", 7),
    ];

    /// Its name, and the number of `general.file_type`.
    fn entry(self) -> (&'static str, u32) {
        let entry = Self::ALL.iter().find(|(kind, ..)| *kind == self);
        entry.map_or(("f32", 0), |(_, name, number)| (name, *number))
    }
}

impl fmt::Display for GgufType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.entry().0)
    }
}

impl FromStr for GgufType {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let mut all = Self::ALL.iter();
        let found = all.find(|(_, name, _)| text.eq_ignore_ascii_case(name));
        let error = || format!("`{text}` is not f32, f16, bf16 or q8_0");
        found.map(|(kind, ..)| *kind).ok_or_else(error)
    }
}

/// Options of [`write_gguf`].
///
/// ```
/// use fp8::models::gguf::{GgufOptions, GgufType};
/// let options = GgufOptions::new(GgufType::BF16).with_name("My model").with_overwrite(true);
/// assert_eq!(options.name.as_deref(), Some("My model"));
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufOptions {
    /// How matrices are stored.
    pub tensor_type: GgufType,
    /// The name of the model; by default that of its directory.
    pub name: Option<String>,
    /// llama.cpp's name of the rule by which the tokenizer splits text (`tokenizer.ggml.pre`); by default recognized.
    pub pre_tokenizer: Option<String>,
    /// Whether an existing file is replaced. Default no.
    pub overwrite: bool,
}

impl GgufOptions {
    /// The defaults.
    pub fn new(tensor_type: GgufType) -> Self {
        Self {
            tensor_type,
            ..Self::default()
        }
    }

    /// See [`GgufOptions::name`].
    #[must_use]
    pub fn with_name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// See [`GgufOptions::pre_tokenizer`].
    #[must_use]
    pub fn with_pre_tokenizer(mut self, name: impl Into<String>) -> Self {
        self.pre_tokenizer = Some(name.into());
        self
    }
}

setters! { GgufOptions:
    /// See [`GgufOptions::overwrite`].
    with_overwrite(overwrite: bool);
}

/// What [`write_gguf`] wrote.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GgufReport {
    /// The file.
    pub path: PathBuf,
    /// llama.cpp's name of the architecture.
    pub architecture: &'static str,
    /// Tensors in the file.
    pub tensors: usize,
    /// Matrices that are f16 because their rows do not divide into blocks.
    pub not_in_blocks: Vec<String>,
    /// Bytes of all tensors.
    pub bytes: u64,
}

/// Writes a model, FP8 of any family or in high precision, as a GGUF file for llama.cpp.
///
/// It writes the models that [`open`](super::open()) opens: the architectures llama (with Mistral's and Mixtral's models), qwen2, qwen3,
/// qwen3moe, phi3 and bert, with byte-level BPE, SentencePiece-like BPE and WordPiece tokenizers. FP8 weights are code * scale in f32,
/// rounded once. Names, the order of rows in queries and keys, rotary factors, token types and chat templates are those of llama.cpp's
/// converter. Scales of KV caches have no place in the format and are left out.
///
/// One tensor is in memory at a time. The file appears when it is complete; an error or a cancelled write leaves nothing behind.
///
/// ```no_run
/// use fp8::load::Checkpoint;
/// use fp8::models::gguf::{GgufOptions, GgufType, write_gguf};
/// use fp8::rewrite;
///
/// let model = Checkpoint::open_dir("model-fp8")?;
/// let options = GgufOptions::new(GgufType::Q8_0);
/// let report = write_gguf(&model, "model.gguf", &options, &mut rewrite::quiet)?;
/// println!("{} tensors of {}", report.tensors, report.architecture);
/// # Ok::<(), fp8::models::Error>(())
/// ```
///
/// # Errors
/// [`Error::Config`] for a model that is not opened, or has a feature that llama.cpp computes in another way; [`GgufError::UnknownTensor`];
/// [`GgufError::UnsupportedTokenizer`]; [`FilesError`](crate::FilesError) for an existing file, a value that is not finite in the stored
/// type, a cancelled write, and if a file cannot be read or written.
pub fn write_gguf(
    source: &dyn Source,
    path: impl AsRef<Path>,
    options: &GgufOptions,
    on_progress: &mut OnProgress<'_>,
) -> Result<GgufReport> {
    let path = path.as_ref();
    if !options.overwrite && std::fs::symlink_metadata(path).is_ok() {
        return Err(fp8_files::Error::TargetExists {
            path: path.to_path_buf(),
            reason: "exists: --overwrite (`with_overwrite`) replaces it",
        }
        .into());
    }
    let model = Described::of(source)?;
    let tensors = plan::plan(&model, options.tensor_type)?;
    let mut entries = metadata::entries(&model, options)?;
    entries.extend(tokenizer::entries(&model, options)?);
    let bytes = tensors.iter().map(plan::Planned::bytes).sum();
    file::write(path, &entries, &tensors, source, on_progress)?;
    let in_f16 = tensors.iter().filter(|tensor| tensor.fell_back);
    Ok(GgufReport {
        path: path.to_path_buf(),
        architecture: model.architecture.name(),
        tensors: tensors.len(),
        not_in_blocks: in_f16.map(|tensor| tensor.name.clone()).collect(),
        bytes,
    })
}

/// A source with its configuration.
struct Described<'a> {
    source: &'a dyn Source,
    config: &'a Value,
    /// The file of the configuration, for messages.
    path: PathBuf,
    parsed: Config,
    architecture: Architecture,
}

impl<'a> Described<'a> {
    fn of(source: &'a dyn Source) -> Result<Self> {
        let directory = source.directory().unwrap_or_default();
        let Some(config) = source.config() else {
            return Err(fp8_files::Error::MissingConfig { path: directory }.into());
        };
        let path = directory.join("config.json");
        let parsed = Config::parse(&path, config)?;
        let text = config.get("text_config").unwrap_or(config);
        let kind = text.get("model_type").and_then(Value::as_str);
        let architecture = Architecture::of(kind.unwrap_or_default());
        Ok(Self {
            source,
            config,
            architecture,
            parsed,
            path,
        })
    }

    /// An error about an entry of the configuration.
    fn unsupported(&self, key: &str, value: impl fmt::Display, expected: &str) -> Error {
        Error::Config {
            path: self.path.clone(),
            key: key.to_string(),
            value: value.to_string(),
            expected: format!("{expected}, which llama.cpp computes"),
        }
    }

    fn unknown(&self, tensor: &str) -> Error {
        let error = GgufError::UnknownTensor {
            path: self.path.parent().unwrap_or(&self.path).to_path_buf(),
            tensor: tensor.to_string(),
            architecture: self.architecture.name(),
        };
        error.into()
    }
}
