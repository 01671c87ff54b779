//! Opens the model in a directory or in a GGUF file.

use super::error::{Error, Result};
use super::families::{Config, LlamaConfig, Model};
use super::files::gguf::{GgufFile, is_gguf};
use super::unread::unread;
use crate::load::{Checkpoint, OpenOptions};
use candle_core::{DType, Device};
use fp8_core::setters;
use fp8_files::rewrite::Source;
use std::path::Path;

/// How [`open()`] builds a model. By default: on the CPU, in f32, with inputs cast as the checkpoint says.
///
/// ```
/// use candle_core::DType;
/// use fp8::load::Inputs;
/// use fp8::models::ModelOptions;
/// let options = ModelOptions::new()
///     .with_dtype(DType::BF16)
///     .with_checkpoint(fp8::load::OpenOptions::new().with_inputs(Inputs::WeightOnly));
/// # assert_eq!(options.dtype, DType::BF16);
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ModelOptions {
    /// Dtype of activations and of weights that are not FP8: f32, bf16 or f16.
    pub dtype: DType,
    /// The device that the model computes on.
    pub device: Device,
    /// How the checkpoint is read.
    pub checkpoint: OpenOptions,
}

impl Default for ModelOptions {
    fn default() -> Self {
        Self {
            dtype: DType::F32,
            device: Device::Cpu,
            checkpoint: OpenOptions::default(),
        }
    }
}

impl ModelOptions {
    /// The defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the device.
    pub fn with_device(self, device: &Device) -> Self {
        Self {
            device: device.clone(),
            ..self
        }
    }
}

setters! { ModelOptions:
    /// Sets the dtype of activations.
    with_dtype(dtype: DType);
    /// Sets how the checkpoint is read.
    with_checkpoint(checkpoint: OpenOptions);
}

/// Opens the model in a directory of safetensors with a `config.json` or Mistral's `params.json`, in FP8 of any family or in high
/// precision, or the model in a GGUF file.
///
/// A 16-bit embedding stays in the dtype of the file, whatever the activations are.
///
/// ```no_run
/// use fp8::models::{ModelOptions, open};
///
/// let model = open("Llama-3.2-1B-Instruct-FP8", &ModelOptions::new())?;
/// println!("{} layers", model.llama().map_or(0, |model| model.config().num_layers));
/// # Ok::<(), fp8::models::Error>(())
/// ```
///
/// # Errors
/// As [`Checkpoint::open_dir`] and [`config_of`].
pub fn open(path: impl AsRef<Path>, options: &ModelOptions) -> Result<Model> {
    let path = path.as_ref();
    if is_gguf(path) {
        let file = GgufFile::open(path)?;
        let config = Config::parse(path, &file.config()?)?;
        return Model::new(&config, file.var_builder(options.dtype, &options.device));
    }
    let checkpoint = Checkpoint::open_dir_with(path, &options.checkpoint)?;
    of_checkpoint(checkpoint, path, options)
}

/// [`open()`] for a checkpoint that is already open; `path` is for messages. A warning of `tracing` names the first tensor that the model
/// does not read, if there is one.
///
/// # Errors
/// As [`open()`].
pub fn of_checkpoint(
    checkpoint: Checkpoint,
    path: impl AsRef<Path>,
    options: &ModelOptions,
) -> Result<Model> {
    let path = path.as_ref();
    let (model, unread) = of_checkpoint_with_unread(checkpoint, path, options)?;
    if let Some(first) = unread.first() {
        tracing::warn!(
            "{}: the model does not read {} of the tensors in its files (first {first})",
            path.display(),
            unread.len()
        );
    }
    Ok(model)
}

/// As [`of_checkpoint`], with the names of the tensors that the model does not read instead of a warning: a bias or a classifier, for
/// example, that its configuration does not mention. Tensors that models compute themselves, layers that predict further tokens, and parts for
/// images and sound are not among them.
///
/// # Errors
/// As [`open()`].
pub fn of_checkpoint_with_unread(
    checkpoint: Checkpoint,
    path: impl AsRef<Path>,
    options: &ModelOptions,
) -> Result<(Model, Vec<String>)> {
    let config = config_of(&checkpoint, path)?;
    let (names, loaded) = (Source::names(&checkpoint), checkpoint.loaded_names());
    let stored = config.embedding().and_then(|name| checkpoint.dtype(name));
    let embedding = match stored {
        Some(safetensors::Dtype::BF16) => DType::BF16,
        Some(safetensors::Dtype::F16) => DType::F16,
        _ => options.dtype,
    };
    let merged = checkpoint.merged_adapters()?;
    let vb = checkpoint.var_builder(options.dtype, &options.device)?;
    let mut model = Model::with_embedding_dtype(&config, embedding, vb)?;
    model.set_merged_adapters(merged);
    Ok((model, unread(names, &loaded, &config)))
}

/// The configuration of the model in a directory or in a GGUF file, without its weights.
///
/// # Errors
/// As [`Checkpoint::open_dir`] and [`config_of`].
pub fn open_config(path: impl AsRef<Path>) -> Result<Config> {
    let path = path.as_ref();
    match is_gguf(path) {
        true => Config::parse(path, &GgufFile::open(path)?.config()?),
        false => config_of(&Checkpoint::open_dir(path)?, path),
    }
}

/// The configuration of the model in a checkpoint, from its `config.json` or else from Mistral's `params.json`; `path`, the
/// directory, is for messages.
///
/// # Errors
/// [`Error::Config`] for a configuration that is missing, belongs to an unknown kind of model, lacks an entry, or has fewer layers
/// than the checkpoint.
pub fn config_of(checkpoint: &Checkpoint, path: impl AsRef<Path>) -> Result<Config> {
    let path = path.as_ref();
    let (path, key, config) = match (checkpoint.config(), checkpoint.params()) {
        (Some(config), _) => {
            let path = path.join("config.json");
            let config = Config::parse(&path, config)?;
            (path, "num_hidden_layers", config)
        }
        (None, Some(params)) => {
            let path = path.join("params.json");
            let config = LlamaConfig::parse_params(&path, params)?;
            (path, "n_layers", Config::Llama(config))
        }
        (None, None) => {
            return Err(Error::Config {
                path: path.join("config.json"),
                key: "model_type".into(),
                value: "missing: there is no such file".into(),
                expected: "a configuration that says what model this is".into(),
            });
        }
    };
    let (num_layers, list) = config.layers();
    let layer = |name: &str| {
        let name = name.strip_prefix("bert.").unwrap_or(name);
        let number = name.strip_prefix(list)?.split('.').next()?;
        number.parse::<usize>().ok()
    };
    let names = checkpoint.layer_paths().into_iter();
    let last = (names.chain(checkpoint.other_names()))
        .filter_map(|name| Some((layer(&name)?, name)))
        .max();
    match last {
        Some((last, name)) if last >= num_layers => Err(Error::Config {
            path,
            key: key.into(),
            value: num_layers.to_string(),
            expected: format!("at least {}: there is `{name}`", last.saturating_add(1)),
        }),
        _ => Ok(config),
    }
}
