//! BERT encoders, such as MiniLM, with the mean of their tokens as the embedding of a text.

use super::entries::Entries;
use super::error::{Error, Result};
use super::llama::masked_attention;
use super::pool::in_pool;
use super::token_rows;
use crate::nn::{Embedding, LayerNorm, Linear, VarBuilder, embedding, layer_norm, linear};
use candle_core::{D, DType, Device, Module, Tensor};
use fp8_recipes::Fp8Module;
use serde_json::Value;
use std::path::Path;

/// Shape of a BERT encoder.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct BertConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Features of a token.
    pub hidden_size: usize,
    /// Features inside of an MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Tokens of the longest text.
    pub max_position_embeddings: usize,
    /// Kinds of segments.
    pub type_vocab_size: usize,
    /// Added to the variance in the norms.
    pub layer_norm_eps: f64,
    /// The activation of the MLP.
    pub activation: BertActivation,
}

/// The activation of a BERT encoder's MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum BertActivation {
    /// GELU by the error function.
    Gelu,
    /// GELU by tanh.
    GeluTanh,
    /// Rectified linear.
    Relu,
}

/// From the features of a text's tokens to those of the text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Pooling {
    /// Their mean.
    #[default]
    Mean,
    /// Those of the first token, `[CLS]`.
    FirstToken,
}

impl Pooling {
    /// What `1_Pooling/config.json` of sentence-transformers says, in the directory of a model; the mean if there is no such file.
    ///
    /// # Errors
    /// If the file cannot be read or says something else.
    pub fn of_dir(dir: impl AsRef<Path>) -> Result<Self> {
        const LIMIT: u64 = 1 << 20;
        let path = dir.as_ref().join("1_Pooling").join("config.json");
        if !path.exists() {
            return Ok(Self::Mean);
        }
        let text = fp8_recipes::read::read_text(&path, LIMIT)?;
        let config: Value =
            serde_json::from_str(&text).map_err(|error| fp8_recipes::Error::Json {
                path: path.clone(),
                what: "a configuration of pooling",
                reason: error.to_string(),
            })?;
        let entries = Entries::new(&path, &config);
        let on: Vec<&str> = match &config {
            Value::Object(map) => {
                let modes = map.iter().filter(|(key, value)| {
                    key.starts_with("pooling_mode_") && **value == Value::Bool(true)
                });
                modes.map(|(key, _)| key.as_str()).collect()
            }
            _ => vec![],
        };
        match on.as_slice() {
            ["pooling_mode_mean_tokens"] => Ok(Self::Mean),
            ["pooling_mode_cls_token"] => Ok(Self::FirstToken),
            [] => Err(entries.error(
                "pooling_mode_mean_tokens",
                "true, or pooling_mode_cls_token",
            )),
            [first, ..] => Err(entries.error(
                first,
                "pooling_mode_mean_tokens or pooling_mode_cls_token alone",
            )),
        }
    }
}

impl BertConfig {
    /// Reads the entries of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Config`] naming the entry that is missing or not computed here.
    pub fn parse(path: impl AsRef<Path>, config: &Value) -> Result<Self> {
        let config = Entries::new(path.as_ref(), config);
        if config.text("model_type", None)? != "bert" {
            return Err(config.error("model_type", "bert"));
        }
        if config.text("position_embedding_type", "absolute")? != "absolute" {
            return Err(config.error("position_embedding_type", "absolute"));
        }
        let activation = match config.text("hidden_act", "gelu")?.as_str() {
            "gelu" => BertActivation::Gelu,
            "gelu_new" | "gelu_pytorch_tanh" => BertActivation::GeluTanh,
            "relu" => BertActivation::Relu,
            _ => return Err(config.error("hidden_act", "gelu, gelu_new or relu")),
        };
        let hidden_size = config.size("hidden_size", None)?;
        let num_heads = config.size("num_attention_heads", None)?;
        if hidden_size % num_heads != 0 {
            let expected = format!("a divisor of {hidden_size}, the hidden size");
            return Err(config.error("num_attention_heads", expected));
        }
        Ok(Self {
            vocab_size: config.size("vocab_size", None)?,
            hidden_size,
            intermediate_size: config.size("intermediate_size", None)?,
            num_layers: config.size("num_hidden_layers", None)?,
            num_heads,
            max_position_embeddings: config.size("max_position_embeddings", 512)?,
            type_vocab_size: config.size("type_vocab_size", 2)?,
            layer_norm_eps: config.positive("layer_norm_eps", 1e-12)?,
            activation,
        })
    }
}

#[derive(Debug, Fp8Module)]
struct Layer {
    query: Linear,
    key: Linear,
    value: Linear,
    attention_output: Linear,
    attention_norm: LayerNorm,
    up: Linear,
    down: Linear,
    norm: LayerNorm,
    #[fp8(skip)]
    config: BertConfig,
}

impl Layer {
    fn new(config: &BertConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let (d, inner) = (config.hidden_size, config.intermediate_size);
        let attention = vb.pp("attention");
        let norm = |vb: VarBuilder<'_>| layer_norm(d, config.layer_norm_eps, vb.pp("LayerNorm"));
        Ok(Self {
            query: linear(d, d, attention.pp("self").pp("query"))?,
            key: linear(d, d, attention.pp("self").pp("key"))?,
            value: linear(d, d, attention.pp("self").pp("value"))?,
            attention_output: linear(d, d, attention.pp("output").pp("dense"))?,
            attention_norm: norm(attention.pp("output"))?,
            up: linear(d, inner, vb.pp("intermediate").pp("dense"))?,
            down: linear(inner, d, vb.pp("output").pp("dense"))?,
            norm: norm(vb.pp("output"))?,
            config: config.clone(),
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, tokens, d) = x.dims3()?;
        let (count, size) = (self.config.num_heads, d / self.config.num_heads);
        let heads = |layer: &Linear| -> Result<Tensor> {
            let y = layer.forward(x)?.reshape((batch, tokens, count, size))?;
            Ok(y.transpose(1, 2)?)
        };
        let (q, k, v) = (heads(&self.query)?, heads(&self.key)?, heads(&self.value)?);
        let y = masked_attention(&q, &k, &v, mask, 1. / (size as f64).sqrt())?;
        let y = y.transpose(1, 2)?.reshape((batch, tokens, d))?;
        let x = self
            .attention_norm
            .forward(&(x + self.attention_output.forward(&y)?)?)?;
        let inner = self.up.forward(&x)?;
        let inner = match self.config.activation {
            BertActivation::Gelu => inner.gelu_erf()?,
            BertActivation::GeluTanh => fp8_candle::ops::gelu(&inner)?,
            BertActivation::Relu => inner.relu()?,
        };
        Ok(self.norm.forward(&(x + self.down.forward(&inner)?)?)?)
    }
}

/// A BERT encoder, built on [`crate::nn`]: from an FP8 checkpoint its linear layers hold codes only.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::models::{Bert, BertConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let json = serde_json::json!({
///     "model_type": "bert", "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64,
///     "num_hidden_layers": 2, "num_attention_heads": 4,
/// });
/// let config = BertConfig::parse("config.json", &json)?;
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let model = Bert::new(&config, vb)?;
/// // Two texts; the second one is shorter.
/// let ids = Tensor::new(&[[5u32, 6, 7], [5, 6, 0]], &Device::Cpu)?;
/// let mask = Tensor::new(&[[1u32, 1, 1], [1, 1, 0]], &Device::Cpu)?;
/// let texts = model.embed(&ids, &mask)?; // of length 1, so a dot product is a cosine
/// assert_eq!(texts.dims(), [2, 32]);
/// # Ok(()) }
/// ```
#[derive(Debug, Fp8Module)]
pub struct Bert {
    words: Embedding,
    positions: Embedding,
    types: Embedding,
    norm: LayerNorm,
    layers: Vec<Layer>,
    #[fp8(skip)]
    config: BertConfig,
    #[fp8(skip)]
    device: Device,
}

impl Bert {
    /// Builds the encoder from the tensors of `vb`, with or without a leading `bert.`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let word = "embeddings.word_embeddings.weight";
        let vb = match vb.contains_tensor(&format!("bert.{word}")) && !vb.contains_tensor(word) {
            true => vb.pp("bert"),
            false => vb,
        };
        let d = config.hidden_size;
        let tables = vb.pp("embeddings");
        let table = |size: usize, name: &str| embedding(size, d, tables.pp(name));
        let layers = (0..config.num_layers)
            .map(|i| Layer::new(config, vb.pp("encoder").pp("layer").pp(i)))
            .collect::<Result<_>>()?;
        Ok(Self {
            words: table(config.vocab_size, "word_embeddings")?,
            positions: table(config.max_position_embeddings, "position_embeddings")?,
            types: table(config.type_vocab_size, "token_type_embeddings")?,
            norm: layer_norm(d, config.layer_norm_eps, tables.pp("LayerNorm"))?,
            layers,
            config: config.clone(),
            device: vb.device().clone(),
        })
    }

    /// Its shape.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// Where it computes.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Features of every token, `[batch, tokens, hidden_size]`, of one segment. `mask` `[batch, tokens]` is 0 where a text has
    /// no token.
    ///
    /// # Errors
    /// If an id is not in the vocabulary, a text is longer than the model's positions, or shapes differ.
    pub fn forward(&self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let ids = token_rows(ids, self.config.vocab_size)?;
        let (batch, tokens) = ids.dims2()?;
        if mask.dims() != ids.dims() {
            let reason = format!("the mask is {:?}, the ids {:?}", mask.dims(), ids.dims());
            return Err(Error::TokenIds { reason });
        }
        let most = self.config.max_position_embeddings;
        if tokens > most {
            let reason = format!("a text of {tokens} tokens, at most {most} have positions");
            return Err(Error::TokenIds { reason });
        }
        let positions = Tensor::arange(0, tokens as u32, &self.device)?;
        let x = self
            .words
            .forward(&ids)?
            .broadcast_add(&self.positions.forward(&positions)?)?
            .broadcast_add(
                &self
                    .types
                    .forward(&Tensor::zeros(1, DType::U32, &self.device)?)?,
            )?;
        let mut x = self.norm.forward(&x)?;
        // 0 where there is a token, far below every score elsewhere; -Inf would make NaN of a text without tokens.
        let hidden = (mask.to_dtype(DType::F32)?.affine(-1., 1.)? * -1e30)?;
        let hidden = hidden.reshape((batch, 1, 1, tokens))?;
        for layer in &self.layers {
            x = layer.forward(&x, &hidden)?;
        }
        Ok(x)
    }

    /// The embedding of each text: the mean of its tokens' features, scaled to length 1. `[batch, hidden_size]` in f32.
    ///
    /// # Errors
    /// As [`Bert::forward`].
    pub fn embed(&self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        self.embed_with(ids, mask, Pooling::Mean)
    }

    /// [`Bert::embed`] with another way from the features of tokens to that of a text.
    ///
    /// # Errors
    /// As [`Bert::forward`].
    pub fn embed_with(&self, ids: &Tensor, mask: &Tensor, pooling: Pooling) -> Result<Tensor> {
        let x = in_pool(&self.device, || self.forward(ids, mask))?;
        let x = x.to_dtype(DType::F32)?;
        let mean = match pooling {
            Pooling::Mean => {
                let mask = mask.to_dtype(DType::F32)?.unsqueeze(D::Minus1)?;
                let sum = x.broadcast_mul(&mask)?.sum(1)?;
                sum.broadcast_div(&mask.sum(1)?.maximum(1e-9)?)?
            }
            Pooling::FirstToken => x.narrow(1, 0, 1)?.squeeze(1)?,
        };
        let length = mean.sqr()?.sum_keepdim(D::Minus1)?.sqrt()?.maximum(1e-12)?;
        Ok(mean.broadcast_div(&length)?)
    }
}
