//! The configuration of Llama-like models, from `config.json`.

use crate::models::error::Result;
use crate::models::files::Entries;
use crate::models::layers::{RopeConfig, RopeScaling};
use serde_json::Value;
use std::path::Path;

/// Shape of a Llama-like model.
///
/// ```
/// use fp8::models::LlamaConfig;
///
/// let json = serde_json::json!({
///     "model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96,
///     "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
/// });
/// let config = LlamaConfig::parse("config.json", &json)?;
/// assert_eq!((config.head_dim, config.num_kv_heads), (16, 2));
/// # Ok::<(), fp8::models::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct LlamaConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Features of a token between layers.
    pub hidden_size: usize,
    /// Inner features of a dense layer's MLP.
    pub intermediate_size: usize,
    /// Layers.
    pub num_layers: usize,
    /// Heads of queries.
    pub num_heads: usize,
    /// Heads of keys and values; groups of query heads share one.
    pub num_kv_heads: usize,
    /// Features of a head.
    pub head_dim: usize,
    /// Added to the mean square in the norms.
    pub rms_norm_eps: f64,
    /// Rotary positions.
    pub rope: RopeConfig,
    /// Whether the projections to queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Whether the projection out of the attention has a bias.
    pub output_bias: bool,
    /// Whether the projections of the MLP have a bias.
    pub mlp_bias: bool,
    /// Whether queries and keys of each head are normalized (Qwen3).
    pub qk_norm: bool,
    /// For each layer, the window of attention in tokens; None without a limit.
    pub sliding_windows: Vec<Option<usize>>,
    /// Whether the embedding serves as the output head if the file has no separate one.
    pub tie_word_embeddings: bool,
    /// Tokens that the model was trained for.
    pub max_position_embeddings: usize,
    /// Tokens that end a text.
    pub eos_token_ids: Vec<u32>,
    /// The mixture of experts, if there is one.
    pub moe: Option<MoeConfig>,
}

/// The experts of a mixture.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct MoeConfig {
    /// Experts in a layer.
    pub num_experts: usize,
    /// Experts that each token is routed to.
    pub experts_per_token: usize,
    /// Inner features of an expert.
    pub intermediate_size: usize,
    /// Whether the weights of a token's experts are normalized to sum to 1.
    pub normalize: bool,
    /// How tensors are named.
    pub names: MoeNames,
    /// Layers that have a dense MLP instead.
    pub dense_layers: Vec<usize>,
}

/// Names of a mixture's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MoeNames {
    /// `block_sparse_moe.gate`, `block_sparse_moe.experts.E.w1` (gate), `w3` (up), `w2` (down).
    Mixtral,
    /// `mlp.gate`, `mlp.experts.E.gate_proj`, `up_proj`, `down_proj`.
    Qwen,
}

const TYPES: &str = "llama, mistral, qwen2, qwen3, phi3, mixtral or qwen3_moe";

impl LlamaConfig {
    /// Reads the entries of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Config`](crate::models::Error::Config) naming the entry that is missing or unsupported.
    pub fn parse(path: impl AsRef<Path>, config: &Value) -> Result<Self> {
        let whole = Entries::new(path.as_ref(), config);
        // The language part of a multimodal model.
        let config = whole.object("text_config").unwrap_or(whole);
        let kind = config.text("model_type", None)?;
        let is_qwen = match kind {
            "qwen2" | "qwen3" | "qwen3_moe" => true,
            "llama" | "mistral" | "phi3" | "mixtral" => false,
            _ => return Err(config.error("model_type", TYPES)),
        };
        let hidden_size = config.size("hidden_size", None)?;
        let (num_heads, num_kv_heads) =
            heads(&config, "num_attention_heads", "num_key_value_heads")?;
        let head_dim = match config.get("head_dim") {
            Some(_) => config.size("head_dim", None)?,
            None if hidden_size % num_heads == 0 => hidden_size / num_heads,
            None => {
                let expected = format!("a multiple of the {num_heads} attention heads");
                return Err(config.error("hidden_size", expected));
            }
        };
        if !matches!(config.text("hidden_act", "silu")?, "silu" | "swish") {
            return Err(config.error("hidden_act", "silu"));
        }
        let attention_bias = config.flag("attention_bias", kind == "qwen2")?;
        // What transformers assumes where the file says nothing.
        let (eps, theta) = match kind {
            "mixtral" => (1e-5, 1e6),
            "phi3" => (1e-5, 1e4),
            _ => (1e-6, 1e4),
        };
        let num_layers = config.size_up_to(MAX_LAYERS, "num_hidden_layers", None)?;
        let sliding_windows = match !is_qwen || config.flag("use_sliding_window", false)? {
            true => sliding_windows(&config, kind, num_layers)?,
            false => vec![None; num_layers],
        };
        Ok(Self {
            vocab_size: config.size("vocab_size", None)?,
            hidden_size,
            intermediate_size: config.size("intermediate_size", None)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: config.positive("rms_norm_eps", eps)?,
            rope: RopeConfig::parse(&config, head_dim, theta)?,
            qkv_bias: attention_bias,
            output_bias: attention_bias && kind != "qwen2",
            mlp_bias: config.flag("mlp_bias", false)?,
            qk_norm: is_qwen && kind != "qwen2",
            sliding_windows,
            tie_word_embeddings: config.flag("tie_word_embeddings", false)?,
            max_position_embeddings: config.size("max_position_embeddings", 2048)?,
            eos_token_ids: config.token_ids("eos_token_id")?,
            moe: MoeConfig::parse(&config, kind, num_layers)?,
        })
    }

    /// Tokens that rotary positions cover; None if they adapt to the length of the text.
    pub(super) fn positions(&self) -> Option<usize> {
        let most = self.max_position_embeddings;
        let stretched =
            |from: usize, factor: f64| Some(((from as f64 * factor) as usize).max(most));
        match &self.rope.scaling {
            RopeScaling::Dynamic { .. } => None,
            RopeScaling::Linear { factor } => stretched(most, *factor),
            RopeScaling::Yarn {
                factor, original, ..
            } => stretched(*original, *factor),
            _ => Some(most),
        }
    }
}

/// More layers than any model has.
pub(super) const MAX_LAYERS: usize = 1 << 16;

/// Heads of queries; heads of keys and values, whose number divides theirs.
pub(super) fn heads(config: &Entries<'_>, queries: &str, keys: &str) -> Result<(usize, usize)> {
    let num_heads = config.size(queries, None)?;
    let num_kv_heads = config.size(keys, num_heads)?;
    match num_heads.is_multiple_of(num_kv_heads) {
        true => Ok((num_heads, num_kv_heads)),
        false => {
            let expected = format!("a divisor of the {num_heads} attention heads");
            Err(config.error(keys, expected))
        }
    }
}

/// The window of each layer: from `layer_types`, or in older files from Qwen's `max_window_layers`.
fn sliding_windows(
    config: &Entries<'_>,
    kind: &str,
    num_layers: usize,
) -> Result<Vec<Option<usize>>> {
    if config.get("sliding_window").is_none() {
        return Ok(vec![None; num_layers]);
    }
    let window = config.size("sliding_window", None)?;
    if let Some(types) = config.get("layer_types") {
        let of = |value: &Value| match value.as_str() {
            Some("sliding_attention") => Some(Some(window)),
            Some("full_attention") => Some(None),
            _ => None,
        };
        let types = types.as_array().filter(|types| types.len() == num_layers);
        let windows = types.and_then(|types| types.iter().map(of).collect());
        let expected =
            format!("sliding_attention or full_attention for each of {num_layers} layers");
        return windows.ok_or_else(|| config.error("layer_types", expected));
    }
    // As in transformers: the first layers of Qwen2 and Qwen3 see all tokens, those of Qwen3-MoE do not.
    let first = match kind {
        "qwen2" | "qwen3" => config.count("max_window_layers")?.unwrap_or(28),
        _ => 0,
    };
    Ok((0..num_layers)
        .map(|layer| (layer >= first).then_some(window))
        .collect())
}

impl MoeConfig {
    fn parse(config: &Entries<'_>, kind: &str, num_layers: usize) -> Result<Option<Self>> {
        // The defaults of transformers.
        let (names, experts, per_token) = match kind {
            "mixtral" => (MoeNames::Mixtral, 8, 2),
            "qwen3_moe" => (MoeNames::Qwen, 128, 8),
            _ => return Ok(None),
        };
        let num_experts = num_experts(config, experts)?;
        let (intermediate, normalize, listed) = match names {
            MoeNames::Mixtral => ("intermediate_size", true, vec![]),
            MoeNames::Qwen => (
                "moe_intermediate_size",
                config.flag("norm_topk_prob", false)?,
                config.token_ids("mlp_only_layers")?,
            ),
        };
        let mut dense_layers: Vec<_> = listed.into_iter().map(|layer| layer as usize).collect();
        let step = config.size("decoder_sparse_step", 1)?;
        dense_layers.extend((0..num_layers).filter(|layer| (layer + 1) % step != 0));
        Ok(Some(Self {
            num_experts,
            experts_per_token: config.size_up_to(num_experts, "num_experts_per_tok", per_token)?,
            intermediate_size: config.size(intermediate, None)?,
            normalize,
            names,
            dense_layers,
        }))
    }
}

/// transformers 5 writes `num_local_experts` for every mixture; earlier versions wrote `num_experts` for Qwen.
fn num_experts(config: &Entries<'_>, default: usize) -> Result<usize> {
    let (new, old) = ("num_local_experts", "num_experts");
    let count = config.size(old, config.size(new, default)?)?;
    if config.size(new, count)? != count {
        return Err(config.error(new, format!("{count}, as {old} says")));
    }
    Ok(count)
}
