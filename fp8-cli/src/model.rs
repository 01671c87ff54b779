//! Opens the model that a command runs.

use crate::device::DeviceName;
use crate::high_precision;
use crate::source::{Opening, found, found_adapter, needs_fp8, on_base};
use crate::usage::{Usage, at_least, first_given};
use anyhow::{Context, Result, bail};
use candle_core::{DType, Device};
use fp8::load::Checkpoint;
use fp8::models::gguf::{GgufFile, is_gguf};
use fp8::models::{
    Config, GenerationOptions, Llama, Model, ModelOptions, Tokenizer, of_checkpoint_with_unread,
    open, open_config,
};
use fp8::timings::{LayerTimings, decode_where_faster};
use std::path::{Path, PathBuf};

/// Which model to open, and how.
#[derive(clap::Args)]
pub struct Source {
    /// The model: a directory with safetensors files, or a GGUF file
    pub model: PathBuf,
    #[command(flatten)]
    pub how: How,
}

/// How a model is opened.
#[derive(clap::Args)]
pub struct How {
    /// Dtype of everything that is not FP8
    #[arg(long, value_name = "DTYPE", default_value = "f32", value_parser = ["f32", "bf16"])]
    dtype: String,
    /// What the model computes on
    #[arg(long, value_enum, default_value_t)]
    device: DeviceName,
    /// Decode FP8 layers whose products with N tokens are no faster in FP8 on this machine, which is measured once for each shape
    #[arg(long, value_name = "N", value_parser = at_least(1))]
    auto: Option<usize>,
    /// An adapter in PEFT's format to run the model with
    #[arg(long, value_name = "DIR")]
    adapter: Option<PathBuf>,
    #[command(flatten)]
    opening: Opening,
}

impl How {
    pub fn dtype(&self) -> DType {
        match self.dtype.as_str() {
            "bf16" => DType::BF16,
            _ => DType::F32,
        }
    }

    pub fn device(&self) -> Result<Device> {
        self.device.open()
    }

    /// The first given flag that is about a model, and not about what computes.
    pub fn of_a_model(&self) -> Option<&'static str> {
        let given = [
            (self.auto.is_some(), "--auto"),
            (self.adapter.is_some(), "--adapter"),
        ];
        first_given(given).or_else(|| self.opening.given())
    }

    /// Fails for flags that change nothing about the GGUF file at `path`.
    fn check_gguf(&self, path: &Path) -> Result<()> {
        match self.auto {
            Some(_) => Err(Usage(needs_fp8("--auto", path)).into()),
            None => self.opening.check_gguf(path),
        }
    }

    /// Decodes layers, if that was asked for.
    fn decode(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        let Some(tokens) = self.auto else {
            return Ok(());
        };
        let timings = LayerTimings::new();
        let report =
            decode_where_faster(checkpoint, tokens, self.dtype(), &self.device()?, &timings)?;
        let (decoded, all) = (report.decoded(), report.layers.len());
        for warning in &report.warnings {
            eprintln!("warning: {warning}");
        }
        eprintln!(
            "{decoded} of {all} FP8 layers are decoded to {}: they are no faster in FP8 with {tokens} tokens",
            self.dtype
        );
        Ok(())
    }
}

/// Sizes of the linear layers' weights.
#[derive(Default)]
pub struct LinearSize {
    /// As the model holds them, scales included.
    pub bytes: u64,
    pub elements: u64,
}

/// The classes of the encoder at `path`; None for a language model.
pub fn known_classes(path: &Path) -> Result<Option<Vec<String>>> {
    Ok(match open_config(path)? {
        Config::Bert(config) => Some(config.labels),
        _ => None,
    })
}

impl Source {
    /// The model at `path` with default options.
    pub fn of(path: &Path) -> Self {
        Self {
            model: path.to_path_buf(),
            how: How {
                dtype: "f32".into(),
                device: DeviceName::Cpu,
                auto: None,
                adapter: None,
                opening: Opening::default(),
            },
        }
    }

    /// The same model on a device.
    pub fn on(mut self, device: DeviceName) -> Self {
        self.how.device = device;
        self
    }

    /// The same model with an adapter.
    pub fn with_adapter(mut self, adapter: &Path) -> Self {
        self.how.adapter = Some(adapter.to_path_buf());
        self
    }

    pub fn path(&self) -> &Path {
        &self.model
    }

    /// All that is read: the model, and its adapter if there is one.
    pub fn paths(&self) -> impl Iterator<Item = &Path> {
        [Some(&self.model), self.how.adapter.as_ref()]
            .into_iter()
            .flatten()
            .map(PathBuf::as_path)
    }

    fn is_gguf(&self) -> bool {
        is_gguf(&self.model)
    }

    /// Builds the model, with its adapter.
    pub fn load(&self) -> Result<(Model, LinearSize)> {
        let (model, size) = self.load_base()?;
        Ok((self.adapted(model)?, size))
    }

    fn adapted(&self, mut model: Model) -> Result<Model> {
        if let Some(adapter) = &self.how.adapter {
            found_adapter(adapter)?;
            let loaded = model.load_adapter("adapter", adapter);
            loaded.map_err(|error| on_base(error, adapter))?;
        }
        Ok(model)
    }

    /// Adds the adapter that `model` was loaded with to its weights, if there is one.
    pub fn merge_adapter(&self, model: &mut Model) -> Result<()> {
        match &self.how.adapter {
            Some(_) => Ok(model.merge_adapter("adapter")?),
            None => Ok(()),
        }
    }

    fn load_base(&self) -> Result<(Model, LinearSize)> {
        found(&self.model)?;
        let dtype = self.how.dtype();
        let device = self.how.device()?;
        let options = ModelOptions::new().with_dtype(dtype).with_device(&device);
        if self.is_gguf() {
            self.how.check_gguf(&self.model)?;
            let file = GgufFile::open(&self.model)?;
            let mut size = LinearSize::default();
            for name in file.names() {
                size.add(name, file.shape(name).unwrap_or_default(), dtype);
            }
            return Ok((open(&self.model, &options)?, size));
        }
        let mut checkpoint = self.how.opening.open(&self.model)?;
        self.how.decode(&mut checkpoint)?;
        let size = LinearSize::of(&checkpoint, dtype)?;
        let (model, unread) = of_checkpoint_with_unread(checkpoint, &self.model, &options)?;
        if let Some(first) = unread.first() {
            eprintln!(
                "warning: the model does not read {} of the tensors in its files (first {first})",
                unread.len()
            );
        }
        Ok((model, size))
    }

    /// The model with all weights in high precision.
    pub fn load_high_precision(&self) -> Result<Model> {
        if !self.is_gguf() {
            let checkpoint = self.how.opening.open(&self.model)?;
            if !checkpoint.layer_paths().is_empty() {
                return self.adapted(high_precision::model(
                    &checkpoint,
                    &self.model,
                    &self.how.device()?,
                )?);
            }
        }
        Ok(self.load()?.0)
    }

    /// Builds the model; an error if it is not a language model.
    pub fn load_llama(&self) -> Result<(Llama, LinearSize)> {
        match self.load()? {
            (Model::Llama(llama), size) => Ok((llama, size)),
            _ => bail!("{} is not a language model", self.model.display()),
        }
    }

    /// The directory of the files beside the weights.
    fn directory(&self) -> Result<&Path> {
        found(&self.model)?;
        match self.model.is_dir() {
            true => Ok(&self.model),
            false => bail!(
                "{} is neither the directory of a model nor a GGUF file",
                self.model.display()
            ),
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

impl LinearSize {
    fn of(checkpoint: &Checkpoint, dtype: DType) -> Result<Self> {
        let mut sum = Self::default();
        for path in checkpoint.layer_paths() {
            let layer = checkpoint
                .stored_layer(&path, &Device::Cpu)
                .with_context(|| format!("layer {path}"))?;
            let codes = layer.codes.codes().elem_count() as u64;
            sum.elements += codes;
            if checkpoint.is_decoded(&path) {
                sum.bytes += codes * dtype.size_in_bytes() as u64;
                continue;
            }
            sum.bytes += codes + 4 * layer.codes.dequant_scale().elem_count() as u64;
        }
        for name in checkpoint.other_names() {
            sum.add(&name, checkpoint.shape(&name).unwrap_or_default(), dtype);
        }
        Ok(sum)
    }

    /// Adds a tensor that the model holds in `dtype`, if it is the weight of a linear layer.
    fn add(&mut self, name: &str, shape: &[usize], dtype: DType) {
        let in_layer = [".layers.", ".layer."]
            .iter()
            .any(|part| name.contains(part));
        if in_layer && name.ends_with(".weight") && !name.to_lowercase().contains("norm") {
            let elements: u64 = shape.iter().map(|&size| size as u64).product();
            self.elements += elements;
            self.bytes += elements * dtype.size_in_bytes() as u64;
        }
    }
}
