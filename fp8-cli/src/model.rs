//! Opens the model that a command runs.

use crate::high_precision;
use crate::source::Opening;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use fp8::load::Checkpoint;
use fp8::models::gguf::{GgufFile, is_gguf};
use fp8::models::{GenerationOptions, Llama, Model, ModelOptions, Tokenizer, of_checkpoint, open};
use std::path::{Path, PathBuf};

/// Which model, and how it is opened.
#[derive(clap::Args)]
pub struct Source {
    /// The model: a directory with safetensors files, or a GGUF file
    model: PathBuf,
    /// The dtype of everything that is not FP8
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    #[command(flatten)]
    opening: Opening,
}

/// Sizes of the linear layers' weights.
#[derive(Default)]
pub struct LinearSize {
    /// As the model holds them, scales included.
    pub bytes: u64,
    pub elements: u64,
}

impl Source {
    /// The model at `path` with default options.
    pub fn of(path: &Path) -> Self {
        Self {
            model: path.to_path_buf(),
            dtype: "f32".into(),
            opening: Opening::default(),
        }
    }

    pub fn path(&self) -> &Path {
        &self.model
    }

    fn is_gguf(&self) -> bool {
        is_gguf(&self.model)
    }

    /// Builds the model.
    pub fn load(&self) -> Result<(Model, LinearSize)> {
        let dtype = match self.dtype.as_str() {
            "bf16" => DType::BF16,
            _ => DType::F32,
        };
        let options = ModelOptions::new().with_dtype(dtype);
        if self.is_gguf() {
            let file = GgufFile::open(&self.model)?;
            let shapes = file
                .names()
                .filter_map(|name| Some((name, file.shape(name)?)));
            let elements = linear(shapes.map(|(name, shape)| (name, elements(shape))));
            let bytes = elements * dtype.size_in_bytes() as u64;
            let size = LinearSize { bytes, elements };
            return Ok((open(&self.model, &options)?, size));
        }
        let checkpoint = self.opening.open(&self.model)?;
        let size = linear_size(&checkpoint, dtype)?;
        Ok((of_checkpoint(checkpoint, &self.model, &options)?, size))
    }

    /// The model with all weights in high precision.
    pub fn load_high_precision(&self) -> Result<Model> {
        if !self.is_gguf() {
            let checkpoint = self.opening.open(&self.model)?;
            if !checkpoint.layer_paths().is_empty() {
                return Ok(high_precision::model(checkpoint, &self.model)?);
            }
        }
        Ok(self.load()?.0)
    }

    /// Builds the model; an error if it is not a language model.
    pub fn load_llama(&self) -> Result<(Llama, LinearSize)> {
        match self.load()? {
            (Model::Llama(llama), size) => Ok((llama, size)),
            _ => bail!("{} is no language model", self.model.display()),
        }
    }

    /// The directory of the files beside the weights.
    fn directory(&self) -> Result<&Path> {
        let path = &self.model;
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => Ok(path),
            Ok(_) => bail!(
                "{} is neither the directory of a model nor a GGUF file",
                path.display()
            ),
            Err(error) => Err(error).with_context(|| path.display().to_string()),
        }
    }

    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match self.is_gguf() {
            true => Ok(Tokenizer::from_gguf(&GgufFile::open(&self.model)?)?),
            false => Ok(Tokenizer::open(self.directory()?)?),
        }
    }

    /// The generation options in the model's files.
    pub fn generation(&self) -> Result<GenerationOptions> {
        match self.is_gguf() {
            true => Ok(GenerationOptions::default()),
            false => Ok(GenerationOptions::from_dir(self.directory()?)?),
        }
    }
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|&size| size as u64).product()
}

/// Sums over the weights of linear layers, without embeddings.
fn linear<'a>(sizes: impl Iterator<Item = (&'a str, u64)>) -> u64 {
    sizes
        .filter(|(name, _)| is_linear(name))
        .map(|(_, size)| size)
        .sum()
}

fn is_linear(name: &str) -> bool {
    let layer = [".layers.", ".layer."]
        .iter()
        .any(|part| name.contains(part));
    layer && name.ends_with(".weight") && !name.to_lowercase().contains("norm")
}

/// Bytes and elements of linear weights, as the model holds them.
fn linear_size(checkpoint: &Checkpoint, dtype: DType) -> Result<LinearSize> {
    let mut sum = LinearSize::default();
    for path in checkpoint.layer_paths() {
        let layer = checkpoint
            .stored_layer(&path, &Device::Cpu)
            .with_context(|| format!("layer {path}"))?;
        let codes = layer.codes.codes().elem_count() as u64;
        sum.elements += codes;
        sum.bytes += codes + 4 * layer.codes.dequant_scale().elem_count() as u64;
    }
    for name in checkpoint.other_names() {
        if is_linear(&name) {
            let size = elements(checkpoint.shape(&name).unwrap_or_default());
            sum.elements += size;
            sum.bytes += size * dtype.size_in_bytes() as u64;
        }
    }
    Ok(sum)
}
