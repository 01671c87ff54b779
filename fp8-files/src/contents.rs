//! The contents of a model's files: layers with their schemes, and the roles of tensors.

use crate::scheme::LayerScheme;

/// A linear layer in FP8, without its numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Described {
    /// Canonical path.
    pub path: String,
    /// How its weight and inputs are scaled.
    pub scheme: LayerScheme,
    /// Output and input features.
    pub sizes: (usize, usize),
}

/// The scales of one KV cache: dequant_scales, one number or one per head.
#[derive(Debug, Clone, PartialEq)]
pub struct KvScale {
    /// Canonical path of the attention (`..self_attn`).
    pub attention: String,
    /// Scales of keys.
    pub k: Vec<f32>,
    /// Scales of values.
    pub v: Vec<f32>,
}

/// A scale of attention that is not for cached keys or values: for queries or for probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionScale {
    /// Canonical name: `..self_attn.q_scale` or `..self_attn.prob_output_scale`.
    pub name: String,
    /// Dequant_scales, one number or one per head.
    pub values: Vec<f32>,
}

/// Everything that the configuration of a quantization describes.
#[derive(Debug, Clone, Default)]
pub struct Contents {
    /// Layers in FP8, in the order of the model.
    pub layers: Vec<Described>,
    /// Paths of linear layers in high precision.
    pub ignored: Vec<String>,
    /// Paths of embeddings. They are not linear layers, but some configurations list them too.
    pub embeddings: Vec<String>,
    /// Scales of KV caches.
    pub kv: Vec<KvScale>,
    /// Other scales of attention.
    pub attention: Vec<AttentionScale>,
}

impl Contents {
    /// Whether the head is among the layers, in FP8 or high precision.
    pub(crate) fn has_head(&self) -> bool {
        let paths = self.layers.iter().map(|layer| &layer.path);
        paths.chain(&self.ignored).any(|path| is_head(path))
    }

    /// Adds layers that other engines have but this model does not: the head of a language model that multiplies by its embedding, and the
    /// pooler of a BERT encoder, which hidden states do not need.
    pub fn name_absent_layers(&mut self) {
        const TIED: [&str; 3] = ["embed_tokens", "wte", "word_embeddings"];
        let has_head = self.has_head();
        for table in &self.embeddings {
            let own = table.rsplit('.').next().unwrap_or(table);
            let absent = match table.strip_suffix("embeddings.word_embeddings") {
                Some(root) if root.is_empty() || root.ends_with('.') => {
                    format!("{root}pooler.dense")
                }
                _ if TIED.contains(&own) && !has_head => HEAD.to_string(),
                _ => continue,
            };
            let layers = self.layers.iter().map(|layer| &layer.path);
            if !layers.chain(&self.ignored).any(|path| *path == absent) {
                self.ignored.push(absent);
            }
        }
    }

    /// Makes input scales exact. Returns the paths of the layers where they were powers of two.
    pub(crate) fn make_inputs_exact(&mut self) -> Vec<String> {
        let powers = self.power_of_two_inputs();
        for layer in &mut self.layers {
            layer.scheme = layer.scheme.with_exact_inputs();
        }
        powers
    }

    /// Paths of the layers whose input scales are powers of two.
    pub fn power_of_two_inputs(&self) -> Vec<String> {
        let layers = self.layers.iter();
        let layers = layers.filter(|layer| layer.scheme.input.has_power_of_two_scales());
        layers.map(|layer| layer.path.clone()).collect()
    }
}

/// The head of a language model, by Hugging Face's name.
pub(crate) const HEAD: &str = "lm_head";

/// Whether the layer at `path` computes logits or classes. Files usually keep it in high precision.
pub(crate) fn is_head(path: &str) -> bool {
    const HEADS: [&str; 5] = ["lm_head", "embed_out", "output", "score", "classifier"];
    let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
    match name {
        // BERT has modules of this name in every layer.
        "output" => parent.is_empty() || parent == "model",
        name => HEADS.contains(&name),
    }
}

/// The role of a matrix called `X.weight`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// The weight of a linear layer.
    Linear,
    /// Computes logits or classes.
    Head,
    /// Chooses experts: tiny and sensitive.
    Router,
    /// A table of embeddings.
    Embedding,
    /// Has `embed` or `norm` in its name, but not the name of a table (`embeddings_project`): it keeps its precision, and lists of
    /// ignored layers name it, because it may be the weight of a linear layer.
    Unknown,
}

/// The layer path and role of a matrix called `X.weight`; None for any other name.
pub fn role_by_name(name: &str) -> Option<(&str, Role)> {
    const EMBEDDINGS: [&str; 5] = ["wte", "wpe", "shared", "relative_attention_bias", "tok"];
    // Ends of names.
    const TABLES: [&str; 6] = [
        "embed",
        "embedding",
        "embeddings",
        "embed_tokens",
        "embed_positions",
        "embeds",
    ];
    const ROUTERS: [&str; 4] = ["gate", "router", "shared_expert_gate", "classifier_gate"];
    let path = name.strip_suffix(".weight")?;
    if path.is_empty() {
        return None;
    }
    let own = path.rsplit('.').next().unwrap_or(path);
    let is_table = |own: &str| TABLES.iter().any(|end| own.ends_with(end));
    let role = if is_head(path) {
        Role::Head
    } else if EMBEDDINGS.contains(&own) || is_table(own) {
        Role::Embedding
    } else if own.contains("embed") || own.contains("norm") {
        Role::Unknown
    } else if ROUTERS.contains(&own) || own.ends_with("_router") {
        Role::Router
    } else {
        Role::Linear
    };
    Some((path, role))
}
