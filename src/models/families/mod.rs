//! The model families. A family is a file or folder here, and an arm in each `match` of this file.

mod adapted;
mod bert;
mod blocks;
mod causal_lm;
mod llama;

pub use bert::{Bert, BertActivation, BertConfig, Pooling, label_name};
pub(crate) use blocks::{Blocks, NormReaders};
pub use causal_lm::CausalLm;
pub use llama::{
    ExpertGroups, Llama, LlamaConfig, MlaConfig, MoeConfig, MoeNames, QueryGrowth, RouterScores,
    Routing,
};

use crate::models::error::Result;
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use fp8_recipes::Fp8Module;
use serde_json::Value;
use std::path::Path;

/// The configuration of a model of any family.
#[derive(Debug, Clone)]
#[expect(
    clippy::large_enum_variant,
    reason = "a program has one or two of them"
)]
#[non_exhaustive]
pub enum Config {
    /// Of a language model.
    Llama(LlamaConfig),
    /// Of an encoder.
    Bert(BertConfig),
}

impl Config {
    /// Reads a `config.json`, whose `model_type` names the family; `path` is for messages.
    pub(crate) fn parse(path: &Path, config: &Value) -> Result<Self> {
        match config.get("model_type").and_then(Value::as_str) {
            Some("bert") => Ok(Self::Bert(BertConfig::parse(path, config)?)),
            _ => Ok(Self::Llama(LlamaConfig::parse(path, config)?)),
        }
    }

    /// The most tokens of a text; None if positions adapt to its length.
    pub fn max_positions(&self) -> Option<usize> {
        match self {
            Self::Llama(config) => config.positions(),
            Self::Bert(config) => Some(config.max_position_embeddings),
        }
    }

    /// Number of layers that a file may have, and the prefix of their tensors' names.
    pub(crate) fn layers(&self) -> (usize, &'static str) {
        match self {
            Self::Llama(config) => (
                config.num_layers.saturating_add(config.extra_layers),
                "model.layers.",
            ),
            Self::Bert(config) => (config.num_layers, "encoder.layer."),
        }
    }

    /// The embedding table that may stay in the file's own 16-bit dtype.
    pub(crate) fn embedding(&self) -> Option<&'static str> {
        match self {
            Self::Llama(_) => Some("model.embed_tokens.weight"),
            Self::Bert(_) => None,
        }
    }
}

/// A model of any family.
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
#[derive(Debug, Fp8Module)]
#[expect(
    clippy::large_enum_variant,
    reason = "a program has one or two of them"
)]
#[non_exhaustive]
pub enum Model {
    /// A language model.
    Llama(Llama),
    /// An encoder.
    Bert(Bert),
}

impl Model {
    /// Builds the model from the tensors of `vb`.
    ///
    /// # Errors
    /// If a tensor is missing or has another shape.
    pub fn new(config: &Config, vb: VarBuilder<'_>) -> Result<Self> {
        Self::with_embedding_dtype(config, vb.dtype(), vb)
    }

    /// [`Model::new`] with the table of [`Config::embedding`] in another dtype.
    pub(crate) fn with_embedding_dtype(
        config: &Config,
        embedding: DType,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        Ok(match config {
            Config::Llama(config) => {
                Self::Llama(Llama::with_embedding_dtype(config, embedding, vb)?)
            }
            Config::Bert(config) => Self::Bert(Bert::new(config, vb)?),
        })
    }

    /// Logits of a language model, or features of an encoder, for every token of `ids`, `[batch, tokens]`; no token is padding.
    ///
    /// # Errors
    /// As [`Llama::forward`] and [`Bert::forward`].
    pub fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            Self::Llama(model) => model.forward(ids),
            Self::Bert(model) => model.forward(ids, &ids.ones_like()?),
        }
    }

    /// [`Llama::set_operands`]. An encoder has no such setting and stays as it is.
    pub fn set_operands(&mut self, dtype: Option<DType>) {
        if let Self::Llama(model) = self {
            model.set_operands(dtype);
        }
    }

    /// The largest number of tokens that the model has positions for; None means no limit.
    pub fn max_positions(&self) -> Option<usize> {
        match self {
            Self::Llama(model) => model.max_positions(),
            Self::Bert(model) => Some(model.config().max_position_embeddings),
        }
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
