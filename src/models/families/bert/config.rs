//! The configuration of BERT encoders, from `config.json`.

use crate::models::error::Result;
use crate::models::files::Entries;
use serde_json::Value;
use std::path::Path;

/// Shape of a BERT encoder.
///
/// ```
/// use fp8::models::BertConfig;
/// let json = serde_json::json!({
///     "model_type": "bert", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16,
///     "num_hidden_layers": 1, "num_attention_heads": 2,
/// });
/// let config = BertConfig::parse("config.json", &json)?;
/// assert_eq!((config.num_layers, config.max_position_embeddings), (1, 512));
/// # Ok::<(), fp8::models::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct BertConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Features of a token.
    pub hidden_size: usize,
    /// Inner features of the MLP.
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
    /// The names of the classifier's classes; empty for an encoder without a classifier.
    pub labels: Vec<String>,
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

impl BertConfig {
    /// Reads the entries of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Config`](crate::models::Error::Config) naming the entry that is missing or unsupported.
    pub fn parse(path: impl AsRef<Path>, config: &Value) -> Result<Self> {
        let config = Entries::new(path.as_ref(), config);
        if config.text("model_type", None)? != "bert" {
            return Err(config.error("model_type", "bert"));
        }
        config.only("position_embedding_type", "absolute")?;
        // A decoder's tokens see none after them.
        config.only("is_decoder", false)?;
        let activation = match config.text("hidden_act", "gelu")? {
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
            labels: labels(&config)?,
        })
    }
}

/// The classes of `BertForSequenceClassification`: `id2label`, or as many as `num_labels`, which is 2 by default.
fn labels(config: &Entries<'_>) -> Result<Vec<String>> {
    let classes = config.get("architectures").and_then(Value::as_array);
    let is_classifier = classes.is_some_and(|classes| {
        let mut classes = classes.iter().filter_map(Value::as_str);
        classes.any(|class| class == "BertForSequenceClassification")
    });
    if !is_classifier {
        return Ok(vec![]);
    }
    let kind = config.text("problem_type", SINGLE_LABEL)?;
    if kind != SINGLE_LABEL {
        let expected = "single_label_classification: the probabilities of classes add up to 1 here";
        return Err(config.error("problem_type", expected));
    }
    let Some(names) = config.get("id2label") else {
        let count = config.size_up_to(MAX_LABELS, "num_labels", 2)?;
        return Ok((0..count).map(label_name).collect());
    };
    let names = names.as_object().and_then(|names| {
        let name = |number: usize| names.get(&number.to_string())?.as_str().map(String::from);
        (0..names.len()).map(name).collect::<Option<Vec<_>>>()
    });
    names
        .filter(|names| !names.is_empty())
        .ok_or_else(|| config.error("id2label", "a name for each number from \"0\" on"))
}

/// Each text has one of the classes; what a configuration without the entry means.
const SINGLE_LABEL: &str = "single_label_classification";

/// The largest number of classes that a configuration may have without naming them.
const MAX_LABELS: usize = 1 << 20;

/// transformers' name for an unnamed class.
pub fn label_name(number: usize) -> String {
    format!("LABEL_{number}")
}
