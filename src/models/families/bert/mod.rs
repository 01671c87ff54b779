//! BERT encoders, such as MiniLM, with the mean of their tokens as the embedding of a text, or a classifier.

mod adapted;
mod blocks;
mod classes;
mod config;
mod head;
mod pooling;

pub use config::{BertActivation, BertConfig, label_name};
pub use pooling::Pooling;

use head::{Head, POOLER};

use crate::models::adapters::Adapters;
use crate::models::error::{Error, Result};
use crate::models::layers::{Projection, in_pool, masked_attention, token_rows};
use crate::nn::{Embedding, LayerNorm, Linear, VarBuilder, embedding, layer_norm, linear};
use candle_core::{D, DType, Device, Module, Tensor};
use fp8_candle::ops;
use fp8_recipes::Fp8Module;

#[derive(Debug, Clone, Fp8Module)]
pub(crate) struct Layer {
    query: Projection,
    key: Projection,
    value: Projection,
    attention_output: Projection,
    attention_norm: LayerNorm,
    up: Projection,
    down: Projection,
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
            query: linear(d, d, attention.pp("self").pp("query"))?.into(),
            key: linear(d, d, attention.pp("self").pp("key"))?.into(),
            value: linear(d, d, attention.pp("self").pp("value"))?.into(),
            attention_output: linear(d, d, attention.pp("output").pp("dense"))?.into(),
            attention_norm: norm(attention.pp("output"))?,
            up: linear(d, inner, vb.pp("intermediate").pp("dense"))?.into(),
            down: linear(inner, d, vb.pp("output").pp("dense"))?.into(),
            norm: norm(vb.pp("output"))?,
            config: config.clone(),
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, tokens, d) = x.dims3()?;
        let (count, size) = (self.config.num_heads, d / self.config.num_heads);
        let heads = |layer: &Projection| -> Result<Tensor> {
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
            BertActivation::Gelu => ops::Activation::GeluErf.apply(&inner)?,
            BertActivation::GeluTanh => ops::gelu(&inner)?,
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
    head: Option<Box<Head>>,
    /// The pooler of the file, which features do not need; kept for a classifier.
    #[fp8(skip)]
    pooler: Option<Box<Linear>>,
    #[fp8(skip)]
    config: BertConfig,
    #[fp8(skip)]
    device: Device,
    #[fp8(skip)]
    adapters: Adapters,
}

impl Bert {
    /// Builds the encoder from the tensors of `vb`, with or without a leading `bert.`, and its classifier if the configuration has labels.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn new(config: &BertConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let all = vb.clone();
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
        let (mut head, mut pooler) = (None, None);
        match config.labels.len() {
            0 if vb.contains_tensor(&format!("{POOLER}.weight")) => {
                pooler = Some(Box::new(linear(d, d, vb.pp(POOLER))?));
            }
            0 => {}
            classes => head = Some(Box::new(Head::new(d, classes, &all, &vb)?)),
        }
        Ok(Self {
            head,
            pooler,
            words: table(config.vocab_size, "word_embeddings")?,
            positions: table(config.max_position_embeddings, "position_embeddings")?,
            types: table(config.type_vocab_size, "token_type_embeddings")?,
            norm: layer_norm(d, config.layer_norm_eps, tables.pp("LayerNorm"))?,
            layers,
            config: config.clone(),
            device: vb.device().clone(),
            adapters: Adapters::default(),
        })
    }

    /// The configuration.
    pub fn config(&self) -> &BertConfig {
        &self.config
    }

    /// What stands before the names of the encoder's tensors: `bert.` or nothing.
    fn prefix(&self) -> &'static str {
        let path = self.layers.first().map_or("", |layer| layer.query.path());
        match path.starts_with("bert.") {
            true => "bert.",
            false => "",
        }
    }

    /// The device it computes on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Features of every token, `[batch, tokens, hidden_size]`, for texts of one segment. `mask`, `[batch, tokens]`, is 0 at padding.
    ///
    /// # Errors
    /// If an id is not in the vocabulary, a text is longer than the model's positions, or shapes differ.
    pub fn forward(&self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let mut x = self.embedded(ids)?;
        let (batch, tokens, _) = x.dims3()?;
        if mask.dims() != [batch, tokens] {
            let reason = format!("the mask is {:?}, the ids {:?}", mask.dims(), ids.dims());
            return Err(Error::TokenIds { reason });
        }
        // 0 at tokens, a very negative number at padding; -Inf would turn a text without tokens into NaN.
        let hidden = (mask.to_dtype(DType::F32)?.affine(-1., 1.)? * -1e30)?;
        let hidden = hidden.reshape((batch, 1, 1, tokens))?;
        for layer in &self.layers {
            x = layer.forward(&x, &hidden)?;
        }
        Ok(x)
    }

    /// What the first layer gets for token ids `[batch, tokens]`.
    fn embedded(&self, ids: &Tensor) -> Result<Tensor> {
        let ids = token_rows(ids, self.config.vocab_size)?;
        let tokens = ids.dim(1)?;
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
        Ok(self.norm.forward(&x)?)
    }

    /// The embedding of each text: the mean of its tokens' features, scaled to length 1. `[batch, hidden_size]` in f32.
    ///
    /// # Errors
    /// As [`Bert::forward`].
    pub fn embed(&self, ids: &Tensor, mask: &Tensor) -> Result<Tensor> {
        self.embed_with(ids, mask, Pooling::Mean)
    }

    /// [`Bert::embed`] with a choice of pooling.
    ///
    /// # Errors
    /// As [`Bert::forward`].
    pub fn embed_with(&self, ids: &Tensor, mask: &Tensor, pooling: Pooling) -> Result<Tensor> {
        let vectors = self.pooled(ids, mask, pooling)?;
        let length = vectors
            .sqr()?
            .sum_keepdim(D::Minus1)?
            .sqrt()?
            .maximum(1e-12)?;
        Ok(vectors.broadcast_div(&length)?)
    }

    /// [`Bert::embed_with`] of any length: the vectors of models whose `modules.json` has no `Normalize` ([`Pooling::normalizes`]).
    ///
    /// # Errors
    /// As [`Bert::forward`].
    pub fn pooled(&self, ids: &Tensor, mask: &Tensor, pooling: Pooling) -> Result<Tensor> {
        let x = in_pool(&self.device, || self.forward(ids, mask))?;
        let x = x.to_dtype(DType::F32)?;
        Ok(match pooling {
            Pooling::Mean => {
                let mask = mask.to_dtype(DType::F32)?.unsqueeze(D::Minus1)?;
                let sum = x.broadcast_mul(&mask)?.sum(1)?;
                sum.broadcast_div(&mask.sum(1)?.maximum(1e-9)?)?
            }
            Pooling::FirstToken => x.narrow(1, 0, 1)?.squeeze(1)?,
        })
    }
}
