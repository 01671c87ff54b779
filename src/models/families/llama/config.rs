//! The configuration of Llama-like models, from `config.json`.

use super::{MlaConfig, MoeConfig, defaults};
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
    /// Latent attention, if the model has it; [`LlamaConfig::head_dim`] is then that of the cache.
    pub mla: Option<MlaConfig>,
    /// Layers that a file may have after those of the model, which predict further tokens and are not loaded.
    pub extra_layers: usize,
}

const TYPES: &str =
    "llama, mistral, qwen2, qwen3, phi3, mixtral, qwen3_moe, deepseek_v2, deepseek_v3 or mistral4";

impl LlamaConfig {
    /// Reads the entries of a `config.json`; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Config`](crate::models::Error::Config) naming the entry that is missing or unsupported.
    pub fn parse(path: impl AsRef<Path>, config: &Value) -> Result<Self> {
        let whole = Entries::new(path.as_ref(), config);
        // The language part of a multimodal model.
        let part = whole.object("text_config");
        let is_part = part.is_some();
        let config = part.unwrap_or(whole);
        let kind = config.text("model_type", None)?;
        let is_qwen = match kind {
            "qwen2" | "qwen3" | "qwen3_moe" => true,
            "llama" | "mistral" | "phi3" | "mixtral" => false,
            "deepseek_v2" | "deepseek_v3" | "mistral4" => false,
            _ => return Err(config.error("model_type", TYPES)),
        };
        let hidden_size = config.size("hidden_size", None)?;
        let (num_heads, mut num_kv_heads) =
            heads(&config, "num_attention_heads", "num_key_value_heads")?;
        let mla = match kind {
            "deepseek_v2" | "deepseek_v3" | "mistral4" => Some(MlaConfig::parse(&config, kind)?),
            _ => None,
        };
        let head_dim = match (&mla, config.get("head_dim")) {
            (Some(mla), _) => mla.cached_dim(),
            (None, Some(_)) => config.size("head_dim", None)?,
            (None, None) if hidden_size % num_heads == 0 => hidden_size / num_heads,
            (None, None) => {
                let expected = format!("a multiple of the {num_heads} attention heads");
                return Err(config.error("hidden_size", expected));
            }
        };
        let rope = match &mla {
            None => RopeConfig::parse(&config, head_dim, defaults::rope(kind))?,
            Some(mla) => latent_rope(&config, mla, kind)?,
        };
        if !matches!(config.text("hidden_act", "silu")?, "silu" | "swish") {
            return Err(config.error("hidden_act", "silu"));
        }
        let attention_bias = config.flag("attention_bias", false)?;
        let num_layers = config.size_up_to(MAX_LAYERS, "num_hidden_layers", None)?;
        if mla.is_some() {
            num_kv_heads = num_heads;
        }
        let has_windows = match kind {
            "mistral" | "mixtral" | "phi3" => true,
            "qwen2" | "qwen3" | "qwen3_moe" => config.flag("use_sliding_window", false)?,
            // As in transformers, an entry of these families has no effect.
            _ => false,
        };
        let types = layer_types(&config, kind, is_part);
        let sliding_windows = match has_windows {
            true => sliding_windows(&config, kind, types, num_layers)?,
            false => {
                without_windows(&config, "use_sliding_window", "true", types)?;
                vec![None; num_layers]
            }
        };
        Ok(Self {
            vocab_size: config.size("vocab_size", None)?,
            hidden_size,
            intermediate_size: config.size("intermediate_size", None)?,
            num_layers,
            num_heads,
            num_kv_heads,
            head_dim,
            rms_norm_eps: config.positive("rms_norm_eps", defaults::norm_eps(kind))?,
            rope,
            // In transformers Qwen2 has them whatever the entry says.
            qkv_bias: attention_bias || kind == "qwen2",
            output_bias: attention_bias && kind != "qwen2",
            mlp_bias: config.flag("mlp_bias", false)?,
            qk_norm: is_qwen && kind != "qwen2",
            sliding_windows,
            tie_word_embeddings: config.flag("tie_word_embeddings", false)?,
            max_position_embeddings: config
                .size("max_position_embeddings", defaults::positions(kind))?,
            eos_token_ids: config.token_ids("eos_token_id")?,
            moe: MoeConfig::parse(&config, kind, num_layers)?,
            extra_layers: match kind {
                "deepseek_v3" => config.count("num_nextn_predict_layers")?.unwrap_or(1),
                _ => 0,
            },
            mla,
        })
    }

    /// Tokens that rotary positions cover; None if they adapt to the length of the text.
    pub(crate) fn positions(&self) -> Option<usize> {
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

/// The rotation of the part of a head that has positions.
fn latent_rope(config: &Entries<'_>, mla: &MlaConfig, kind: &str) -> Result<RopeConfig> {
    const PARAMETERS: &str = "rope_parameters";
    let is_mistral = kind == "mistral4";
    if is_mistral && config.get(PARAMETERS).is_none() && config.get("rope_scaling").is_none() {
        // transformers would take those of its own, which are YaRN's.
        return Err(config.error(PARAMETERS, "the rotary positions of Mistral 4"));
    }
    let whole = match is_mistral {
        true => mla.plain_dim + mla.rotated_dim,
        false => mla.rotated_dim,
    };
    let rope = RopeConfig::parse(config, whole, defaults::rope(kind))?;
    match rope.dim == mla.rotated_dim {
        true => Ok(rope),
        false => {
            let expected = format!("{}, the features that are rotated", rope.dim);
            Err(config.error("qk_rope_head_dim", expected))
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

/// The entry `layer_types` in families in which it has an effect in transformers 5, which ignores it in the others.
fn layer_types<'a>(config: &Entries<'a>, kind: &str, is_part: bool) -> Option<&'a Value> {
    let has_effect = match kind {
        "qwen2" | "qwen3" => true,
        // A model by itself with this entry is opened as a Ministral, the language part of a larger one is not.
        "mistral" => !is_part,
        _ => false,
    };
    config.get(LAYER_TYPES).filter(|_| has_effect)
}

const LAYER_TYPES: &str = "layer_types";
const SLIDING: &str = "sliding_attention";

/// Fails if a layer is to have a window and there is none, as transformers does when such a model runs.
fn without_windows(
    config: &Entries<'_>,
    key: &str,
    expected: &str,
    types: Option<&Value>,
) -> Result<()> {
    let mut types = types.and_then(Value::as_array).into_iter().flatten();
    match types.any(|of_layer| of_layer == SLIDING) {
        true => {
            let expected = format!("{expected}, as {LAYER_TYPES} has {SLIDING}");
            Err(config.error(key, expected))
        }
        false => Ok(()),
    }
}

/// The window of each layer: as `types` says, or in files without it from Qwen's `max_window_layers`.
fn sliding_windows(
    config: &Entries<'_>,
    kind: &str,
    types: Option<&Value>,
    num_layers: usize,
) -> Result<Vec<Option<usize>>> {
    const KEY: &str = "sliding_window";
    let window = match config.get(KEY) {
        Some(_) => Some(config.size(KEY, None)?),
        // An entry that is null says that there is none.
        None => defaults::window(kind).filter(|_| config.is_absent(KEY)),
    };
    let Some(window) = window else {
        without_windows(config, KEY, "a number of tokens", types)?;
        return Ok(vec![None; num_layers]);
    };
    if let Some(types) = types {
        let of = |value: &Value| match value.as_str() {
            Some(SLIDING) => Some(Some(window)),
            Some("full_attention") => Some(None),
            _ => None,
        };
        let types = types.as_array().filter(|types| types.len() == num_layers);
        let windows = types.and_then(|types| types.iter().map(of).collect());
        let expected =
            format!("sliding_attention or full_attention for each of {num_layers} layers");
        return windows.ok_or_else(|| config.error(LAYER_TYPES, expected));
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
