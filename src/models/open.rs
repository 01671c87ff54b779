//! A directory or a GGUF file to a model.

use super::bert::{Bert, BertConfig};
use super::error::{Error, Result};
use super::gguf::{GgufFile, is_gguf};
use super::llama::{Llama, LlamaConfig};
use crate::load::{Checkpoint, OpenOptions};
use candle_core::{DType, Device};
use candle_nn::VarBuilder;
use serde_json::Value;
use std::path::Path;

/// How [`open()`] makes a model: on the CPU in f32, with inputs treated as the checkpoint says, unless set otherwise.
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
    /// Dtype of activations and of what is not in FP8: f32, bf16 or f16.
    pub dtype: DType,
    /// Where the model computes.
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

    /// Another dtype of activations.
    pub fn with_dtype(self, dtype: DType) -> Self {
        Self { dtype, ..self }
    }

    /// Another device.
    pub fn with_device(self, device: &Device) -> Self {
        Self {
            device: device.clone(),
            ..self
        }
    }

    /// Another way to read the checkpoint.
    pub fn with_checkpoint(self, checkpoint: OpenOptions) -> Self {
        Self { checkpoint, ..self }
    }
}

/// A model of a kind that [`open()`] knows.
///
/// ```no_run
/// use fp8::models::{Model, ModelOptions, open};
///
/// match open("model", &ModelOptions::new())? {
///     Model::Llama(model) => println!("generates with {} layers", model.config().num_layers),
///     Model::Bert(model) => println!("embeds in {} features", model.config().hidden_size),
///     _ => println!("another kind"),
/// }
/// # Ok::<(), fp8::models::Error>(())
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub enum Model {
    /// A language model.
    Llama(Llama),
    /// An encoder.
    Bert(Bert),
}

impl Model {
    /// The model of a configuration, of the tensors of `vb`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn new(config: &Config, vb: VarBuilder<'_>) -> Result<Self> {
        Ok(match config {
            Config::Llama(config) => Self::Llama(Llama::new(config, vb)?),
            Config::Bert(config) => Self::Bert(Bert::new(config, vb)?),
        })
    }

    /// The language model, if it is one.
    pub fn llama(&self) -> Option<&Llama> {
        match self {
            Self::Llama(model) => Some(model),
            Self::Bert(_) => None,
        }
    }

    /// The encoder, if it is one.
    pub fn bert(&self) -> Option<&Bert> {
        match self {
            Self::Bert(model) => Some(model),
            Self::Llama(_) => None,
        }
    }
}

impl fp8_recipes::Fp8Module for Model {
    fn visit(&self, visitor: &mut dyn fp8_recipes::Visitor) {
        match self {
            Self::Llama(model) => model.visit(visitor),
            Self::Bert(model) => model.visit(visitor),
        }
    }
}

/// Opens the model in a directory of safetensors with a `config.json` or Mistral's `params.json`, FP8 of any family or not, or in
/// a GGUF file.
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
        let config = LlamaConfig::parse(path, &file.config()?)?;
        let vb = file.var_builder(options.dtype, &options.device);
        return Ok(Model::Llama(Llama::new(&config, vb)?));
    }
    let checkpoint = Checkpoint::open_dir_with(path, &options.checkpoint)?;
    of_checkpoint(checkpoint, path, options)
}

/// [`open()`] for a checkpoint that is open already; `path` is for messages.
///
/// ```
/// # use fp8::load::Checkpoint;
/// # use fp8::models::{ModelOptions, of_checkpoint};
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8::models::{Llama, LlamaConfig};
/// # let json = serde_json::json!({ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
/// #     "num_hidden_layers": 1, "num_attention_heads": 2 });
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # Llama::new(&LlamaConfig::parse("config.json", &json)?, vb)?;
/// # let dir = tempfile::tempdir()?;
/// std::fs::write(dir.path().join("config.json"), json.to_string())?;
/// vars.save(dir.path().join("model.safetensors"))?;
/// let checkpoint = Checkpoint::open_dir(dir.path())?;
/// println!("{}", checkpoint.family()); // what a model is made of
/// let model = of_checkpoint(checkpoint, dir.path(), &ModelOptions::new())?;
/// assert!(model.llama().is_some());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// As [`open()`].
pub fn of_checkpoint(
    checkpoint: Checkpoint,
    path: impl AsRef<Path>,
    options: &ModelOptions,
) -> Result<Model> {
    let config = match config_of(&checkpoint, path.as_ref())? {
        Config::Bert(config) => {
            let vb = checkpoint.var_builder(options.dtype, &options.device)?;
            return Ok(Model::Bert(Bert::new(&config, vb)?));
        }
        Config::Llama(config) => config,
    };
    let embedding = match checkpoint.dtype("model.embed_tokens.weight") {
        Some(safetensors::Dtype::BF16) => DType::BF16,
        Some(safetensors::Dtype::F16) => DType::F16,
        _ => options.dtype,
    };
    let vb = checkpoint.var_builder(options.dtype, &options.device)?;
    Ok(Model::Llama(Llama::with_embedding_dtype(
        &config, embedding, vb,
    )?))
}

/// The shape of a model, of the kind that it is.
///
/// ```
/// # use fp8::load::Checkpoint;
/// # use fp8::models::{Config, config_of};
/// # use candle_core::{DType, Device, Tensor};
/// # let dir = tempfile::tempdir()?;
/// # let tensors = [("lm_head.weight", Tensor::ones((32, 16), DType::F32, &Device::Cpu)?)].into();
/// # candle_core::safetensors::save(&tensors, dir.path().join("model.safetensors"))?;
/// let json = serde_json::json!({ "model_type": "llama", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
///     "num_hidden_layers": 1, "num_attention_heads": 2 });
/// std::fs::write(dir.path().join("config.json"), json.to_string())?;
/// let checkpoint = Checkpoint::open_dir(dir.path())?;
/// assert!(matches!(config_of(&checkpoint, dir.path())?, Config::Llama(config) if config.num_layers == 1));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Config {
    /// Of a language model.
    Llama(LlamaConfig),
    /// Of an encoder.
    Bert(BertConfig),
}

/// The shape of the model in a checkpoint, by its `config.json` or, where there is none, by Mistral's `params.json`; `path`, the
/// directory, is for messages.
///
/// # Errors
/// [`Error::Config`] for a configuration that is missing, of another kind of model, without what a model needs, or of fewer layers than there are.
pub fn config_of(checkpoint: &Checkpoint, path: impl AsRef<Path>) -> Result<Config> {
    let path = path.as_ref();
    let Some(config) = checkpoint.config() else {
        let path = path.join("params.json");
        return match checkpoint.params() {
            Some(params) => {
                let config = LlamaConfig::parse_params(&path, params)?;
                check_layers(checkpoint, &path, ("n_layers", config.num_layers), DECODER)?;
                Ok(Config::Llama(config))
            }
            None => Err(missing(&path.with_file_name("config.json"))),
        };
    };
    let path = path.join("config.json");
    let is_bert = config.get("model_type").and_then(Value::as_str) == Some("bert");
    const KEY: &str = "num_hidden_layers";
    if is_bert {
        let config = BertConfig::parse(&path, config)?;
        check_layers(
            checkpoint,
            &path,
            (KEY, config.num_layers),
            "encoder.layer.",
        )?;
        return Ok(Config::Bert(config));
    }
    let config = LlamaConfig::parse(&path, config)?;
    check_layers(checkpoint, &path, (KEY, config.num_layers), DECODER)?;
    Ok(Config::Llama(config))
}

/// What the layers of language models are called.
const DECODER: &str = "model.layers.";

/// Fails for tensors of more layers than `key` counts in the configuration at `path`: names begin with `list` and the layer's number.
fn check_layers(
    checkpoint: &Checkpoint,
    path: &Path,
    (key, num_layers): (&str, usize),
    list: &str,
) -> Result<()> {
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
            path: path.to_path_buf(),
            key: key.into(),
            value: num_layers.to_string(),
            expected: format!("at least {}: there is `{name}`", last.saturating_add(1)),
        }),
        _ => Ok(()),
    }
}

fn missing(path: &Path) -> Error {
    Error::Config {
        path: path.to_path_buf(),
        key: "model_type".into(),
        value: "missing: there is no such file".into(),
        expected: "a configuration that says what model this is".into(),
    }
}
