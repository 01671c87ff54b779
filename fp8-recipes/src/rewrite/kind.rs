//! How a layer is stored, without its numbers: what a file format can or cannot say.

use crate::load::InputScheme;
use crate::nn::InputScaling;
use fp8_core::Granularity;
use std::fmt;

/// The granularity of a weight and what becomes of its inputs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Kind {
    pub(crate) weight: Granularity,
    pub(crate) input: InputScheme,
    /// Whether scales that are not static are powers of two.
    pub(crate) power_of_two: bool,
    /// The largest amax that counts for input scales (FBGEMM).
    pub(crate) amax_bound: Option<f32>,
}

impl Kind {
    pub(crate) fn of(weight: Granularity, input: &InputScaling) -> Self {
        let power_of_two = input.has_power_of_two_scales();
        let amax_bound = input.amax_bound();
        let input = match *input {
            InputScaling::None => InputScheme::None,
            InputScaling::Static(_) => InputScheme::Static,
            InputScaling::DynamicPerToken { .. } => InputScheme::PerToken,
            InputScaling::DynamicPerTensor { .. } => InputScheme::PerTensor,
            InputScaling::DynamicPerGroup { size, .. } => InputScheme::PerGroup(size),
            InputScaling::DynamicMx => InputScheme::Mx,
        };
        Self {
            weight,
            input,
            power_of_two,
            amax_bound,
        }
    }

    /// The same weights and inputs, whose scales, where they are made of inputs, are exact.
    pub(crate) fn with_exact_inputs(self) -> Self {
        Self {
            power_of_two: false,
            ..self
        }
    }

    /// Whether loaders have to be told that input scales are powers of two.
    pub(crate) fn has_power_of_two_inputs(&self) -> bool {
        let made_while_running = matches!(
            self.input,
            InputScheme::PerToken | InputScheme::PerTensor | InputScheme::PerGroup(_)
        );
        self.power_of_two && made_while_running
    }

    /// What a configuration says of it, powers of two apart.
    pub(crate) fn group(&self) -> (Granularity, InputScheme) {
        (self.weight, self.input)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} weights with ", self.weight)?;
        match self.input {
            InputScheme::None => f.write_str("inputs in high precision"),
            InputScheme::Static => f.write_str("static input scales"),
            InputScheme::PerToken => f.write_str("inputs scaled per token"),
            InputScheme::PerTensor => f.write_str("inputs scaled per tensor"),
            InputScheme::PerGroup(size) => write!(f, "inputs scaled per group of {size}"),
            InputScheme::Mx => f.write_str("microscaled inputs"),
        }?;
        if self.has_power_of_two_inputs() {
            f.write_str(", input scales powers of two")?;
        }
        match self.amax_bound {
            Some(bound) => write!(f, ", whose amax counts up to {bound}"),
            None => Ok(()),
        }
    }
}

/// A layer that is to be written.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Described {
    pub(crate) path: String,
    pub(crate) kind: Kind,
    /// Output and input features.
    pub(crate) sizes: (usize, usize),
}

/// The scales of one KV cache: canonical path of the attention (`..self_attn`) and how many numbers each has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KvScale {
    pub(crate) attention: String,
    pub(crate) k: Vec<f32>,
    pub(crate) v: Vec<f32>,
}

/// A scale of attention that is not for cached keys or values: for queries or for probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AttentionScale {
    /// Canonical name: `..self_attn.q_scale` or `..self_attn.prob_output_scale`.
    pub(crate) name: String,
    pub(crate) values: Vec<f32>,
}

/// Everything that a configuration is made of.
#[derive(Debug, Clone, Default)]
pub(crate) struct Contents {
    /// Layers in FP8, in the order of the model.
    pub(crate) layers: Vec<Described>,
    /// Linear layers in high precision.
    pub(crate) ignored: Vec<String>,
    /// Embeddings, which are no linear layers but may be named beside them.
    pub(crate) embeddings: Vec<String>,
    pub(crate) kv: Vec<KvScale>,
    pub(crate) attention: Vec<AttentionScale>,
}

impl Contents {
    /// Whether a layer that makes logits or classes is named.
    pub(crate) fn has_head(&self) -> bool {
        let paths = self.layers.iter().map(|layer| &layer.path);
        paths.chain(&self.ignored).any(|path| is_head(path))
    }

    /// Names layers that other engines have and the model does not show: the head of a language model that multiplies by its
    /// embedding, and the pooler of a BERT encoder, which its hidden states do without.
    pub(crate) fn name_absent_layers(&mut self) {
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

    /// Makes input scales exact; paths of the layers where they were powers of two.
    pub(crate) fn make_inputs_exact(&mut self) -> Vec<String> {
        let powers = self.power_of_two_inputs();
        for layer in &mut self.layers {
            layer.kind = layer.kind.with_exact_inputs();
        }
        powers
    }

    /// Layers whose input scales are to be powers of two wherever the file is loaded.
    pub(crate) fn power_of_two_inputs(&self) -> Vec<String> {
        let layers = self.layers.iter();
        let layers = layers.filter(|layer| layer.kind.has_power_of_two_inputs());
        layers.map(|layer| layer.path.clone()).collect()
    }
}

/// The head of a language model, by Hugging Face's name.
pub(crate) const HEAD: &str = "lm_head";

/// Whether the layer at `path` makes logits or classes: files keep it in high precision as a rule.
pub(crate) fn is_head(path: &str) -> bool {
    const HEADS: [&str; 5] = ["lm_head", "embed_out", "output", "score", "classifier"];
    let (parent, name) = path.rsplit_once('.').unwrap_or(("", path));
    match name {
        // BERT has modules of that name in each layer.
        "output" => parent.is_empty() || parent == "model",
        name => HEADS.contains(&name),
    }
}
