//! Opening a model that runs.

use crate::source::Opening;
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use fp8::load::Checkpoint;
use fp8::models::gguf::GgufFile;
use fp8::models::{Bert, BertConfig, GenerationOptions, Llama, LlamaConfig, Tokenizer};
use serde_json::Value;
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

/// A model that runs.
pub enum Model {
    /// A language model.
    Llama(Llama),
    /// An encoder.
    Bert(Bert),
}

/// Sizes of the weights of linear layers.
#[derive(Default)]
pub struct LinearSize {
    /// As the model holds them, scales included.
    pub bytes: u64,
    pub elements: u64,
}

impl Source {
    pub fn path(&self) -> &Path {
        &self.model
    }

    fn is_gguf(&self) -> bool {
        let extension = self.model.extension();
        extension.is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    }

    /// Builds the model.
    pub fn load(&self) -> Result<(Model, LinearSize)> {
        let dtype = match self.dtype.as_str() {
            "bf16" => DType::BF16,
            _ => DType::F32,
        };
        let device = Device::Cpu;
        if self.is_gguf() {
            let file = GgufFile::open(&self.model)?;
            let config = file.config()?;
            let shapes = file
                .names()
                .filter_map(|name| Some((name, file.shape(name)?)));
            let elements = linear(shapes.map(|(name, shape)| (name, elements(shape))));
            let vb = file.var_builder(dtype, &device);
            let bytes = elements * dtype.size_in_bytes() as u64;
            let size = LinearSize { bytes, elements };
            return Ok((build(&self.model, &config, vb)?, size));
        }
        let checkpoint = self.opening.open(&self.model)?;
        let config = match checkpoint.config() {
            Some(config) => config.clone(),
            None => bail!("{} has no config.json", self.model.display()),
        };
        let size = linear_size(&checkpoint, dtype)?;
        let vb = checkpoint.var_builder(dtype, &device)?;
        let path = self.model.join("config.json");
        Ok((build(&path, &config, vb)?, size))
    }

    /// A language model, nothing else.
    pub fn load_llama(&self) -> Result<(Llama, LinearSize)> {
        match self.load()? {
            (Model::Llama(llama), size) => Ok((llama, size)),
            (Model::Bert(_), _) => bail!(
                "{} is an encoder, expected a language model",
                self.model.display()
            ),
        }
    }

    pub fn tokenizer(&self) -> Result<Tokenizer> {
        match self.is_gguf() {
            true => Ok(Tokenizer::from_gguf(&GgufFile::open(&self.model)?)?),
            false => Ok(Tokenizer::open(&self.model)?),
        }
    }

    /// What the model's files say about generation.
    pub fn generation(&self) -> Result<GenerationOptions> {
        match self.is_gguf() {
            true => Ok(GenerationOptions::default()),
            false => Ok(GenerationOptions::from_dir(&self.model)?),
        }
    }
}

fn build(path: &Path, config: &Value, vb: VarBuilder<'_>) -> Result<Model> {
    if config["model_type"] == "bert" {
        let config = BertConfig::parse(path, config)?;
        return Ok(Model::Bert(Bert::new(&config, vb)?));
    }
    let config = LlamaConfig::parse(path, config)?;
    Ok(Model::Llama(Llama::new(&config, vb)?))
}

fn elements(shape: &[usize]) -> u64 {
    shape.iter().map(|&size| size as u64).product()
}

/// Sums over the weights of linear layers: matrices that are no tables.
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
