//! Writes a model of any family as a GGUF file, as llama.cpp's own converter does.

mod described;
mod encode;
mod file;
mod keys;
mod metadata;
mod names;
mod options;
mod plan;
mod rope;
mod tokenizer;
mod vocabulary;

pub use options::{GgufOptions, GgufType};

use super::error::Result;
#[cfg(doc)]
use super::error::{Error, GgufError};
use crate::rewrite::{OnProgress, Source};
use described::Described;
use std::path::{Path, PathBuf};

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
/// It writes most models that [`open`](super::open()) opens: the architectures llama (with Mistral's and Mixtral's models), qwen2, qwen3,
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
/// [`Error::Config`] for a model that [`open`](super::open()) does not open, or with a feature that llama.cpp computes in another way; [`GgufError::UnknownTensor`];
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
