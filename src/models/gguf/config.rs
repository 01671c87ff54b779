//! `config.json` from the metadata of a GGUF file.

use super::names::Architecture;
use super::{GgufError, GgufFile};
use candle_core::quantized::gguf_file::Value as Entry;
use serde_json::{Map, Value, json};

/// How far the factors of `rope_freqs.weight` (f32) may be from those of the formula.
const FACTOR_TOLERANCE: f32 = 1e-3;

/// Shapes that the metadata tell.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dimensions {
    pub(super) layers: usize,
    pub(super) hidden: usize,
    pub(super) intermediate: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
}

impl GgufFile {
    /// A metadata entry of this architecture, such as `block_count` for `llama.block_count`.
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.prefix)
    }

    pub(super) fn metadata_error(&self, key: &str, expected: &'static str) -> GgufError {
        let value = match self.content.metadata.get(key) {
            None => "missing".to_string(),
            Some(Entry::Array(values)) => format!("an array of {}", values.len()),
            Some(value) => format!("{value:?}"),
        };
        GgufError::Metadata {
            path: self.path.clone(),
            key: key.to_string(),
            value,
            expected,
        }
    }

    /// A whole number, of any type; `None` where the entry is missing.
    pub(super) fn count(&self, key: &str) -> Result<Option<usize>, GgufError> {
        let number = match self.content.metadata.get(key) {
            None => return Ok(None),
            Some(Entry::I8(v)) => u64::try_from(*v).ok(),
            Some(Entry::I16(v)) => u64::try_from(*v).ok(),
            Some(Entry::I32(v)) => u64::try_from(*v).ok(),
            Some(Entry::I64(v)) => u64::try_from(*v).ok(),
            Some(Entry::U16(v)) => Some(u64::from(*v)),
            Some(value) => value.to_u64().ok(),
        };
        // Beyond this no model has anything, and products of two stay within usize.
        let number = number.filter(|&number| number < 1 << 31);
        match number {
            Some(number) => Ok(Some(number as usize)),
            None => Err(self.metadata_error(key, "a whole number")),
        }
    }

    /// A number with a fraction: the shortest decimal that is this f32, as it was before it was written as one.
    fn float(&self, key: &str) -> Result<Option<f64>, GgufError> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Entry::F32(value)) if value.is_finite() => Ok(value.to_string().parse().ok()),
            Some(Entry::F64(value)) if value.is_finite() => Ok(Some(*value)),
            Some(_) => Err(self.metadata_error(key, "a finite number")),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<&str>, GgufError> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Entry::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.metadata_error(key, "a text")),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, GgufError> {
        match self.content.metadata.get(key) {
            None => Ok(None),
            Some(Entry::Bool(value)) => Ok(Some(*value)),
            Some(_) => Err(self.metadata_error(key, "true or false")),
        }
    }

    fn unsupported(&self, what: String) -> GgufError {
        let path = self.path.clone();
        GgufError::UnsupportedModel { path, what }
    }

    /// Reads and checks the shapes.
    pub(super) fn read_dimensions(&self) -> Result<Dimensions, GgufError> {
        let needed = |name: &str| -> Result<usize, GgufError> {
            let key = self.key(name);
            match self.count(&key)? {
                Some(value) if value > 0 => Ok(value),
                _ => Err(self.metadata_error(&key, "a whole number above 0")),
            }
        };
        let optional = |name: &str| self.count(&self.key(name));
        let heads = needed("attention.head_count")?;
        let kv_heads = optional("attention.head_count_kv")?.unwrap_or(heads);
        let hidden = needed("embedding_length")?;
        let head_dim = match optional("attention.key_length")? {
            Some(length) => length,
            None if hidden % heads == 0 => hidden / heads,
            None => 0,
        };
        if kv_heads == 0 || heads % kv_heads != 0 {
            let key = self.key("attention.head_count_kv");
            return Err(self.metadata_error(&key, "a divisor of the number of heads"));
        }
        if head_dim == 0 || head_dim % 2 != 0 {
            return Err(self.metadata_error(&self.key("attention.key_length"), "an even number"));
        }
        let values = optional("attention.value_length")?.unwrap_or(head_dim);
        let turned = optional("rope.dimension_count")?.unwrap_or(head_dim);
        if values != head_dim || turned != head_dim {
            let what = format!(
                "heads with {head_dim} elements of keys, {values} of values and {turned} turned by their position"
            );
            return Err(self.unsupported(what));
        }
        if let Some(experts) = optional("expert_count")?.filter(|&count| count > 0) {
            return Err(self.unsupported(format!("a mixture of {experts} experts")));
        }
        Ok(Dimensions {
            layers: needed("block_count")?,
            hidden,
            intermediate: needed("feed_forward_length")?,
            heads,
            kv_heads,
            head_dim,
        })
    }

    /// The `config.json` of this model, as transformers reads it.
    ///
    /// # Errors
    /// [`GgufError`] for metadata that are missing or that no `config.json` can tell.
    pub fn config(&self) -> Result<Value, GgufError> {
        let Dimensions {
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
        } = self.dimensions;
        let window = self.count(&self.key("attention.sliding_window"))?;
        let window = window.filter(|&window| window > 0);
        let (class, model_type) = match self.architecture {
            // Only Mistral's models have a window.
            Architecture::Llama if window.is_some() => ("MistralForCausalLM", "mistral"),
            Architecture::Llama => ("LlamaForCausalLM", "llama"),
            Architecture::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Architecture::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        };
        let epsilon_key = self.key("attention.layer_norm_rms_epsilon");
        let epsilon = match self.float(&epsilon_key)? {
            Some(epsilon) if epsilon > 0.0 => epsilon,
            _ => return Err(self.metadata_error(&epsilon_key, "a number above 0")),
        };
        let theta = self.float(&self.key("rope.freq_base"))?.unwrap_or(10000.0);
        let mut config = Map::new();
        let mut set = |key: &str, value: Value| config.insert(key.to_string(), value);
        set("architectures", json!([class]));
        set("model_type", json!(model_type));
        set("hidden_size", json!(hidden));
        set("intermediate_size", json!(intermediate));
        set("num_hidden_layers", json!(layers));
        set("num_attention_heads", json!(heads));
        set("num_key_value_heads", json!(kv_heads));
        set("head_dim", json!(head_dim));
        set("hidden_act", json!("silu"));
        set("rms_norm_eps", json!(epsilon));
        set("rope_theta", json!(theta));
        set("vocab_size", json!(self.vocab_size));
        set("tie_word_embeddings", json!(!self.has("output.weight")));
        if let Some(length) = self.count(&self.key("context_length"))? {
            set("max_position_embeddings", json!(length));
        }
        if let Some(scaling) = self.rope_scaling(theta)? {
            set("rope_scaling", scaling);
        }
        if let Some(window) = window {
            set("sliding_window", json!(window));
        }
        let is_qwen2 = self.architecture == Architecture::Qwen2;
        if !is_qwen2 {
            set("attention_bias", json!(self.has("blk.0.attn_q.bias")));
        }
        if self.architecture == Architecture::Llama {
            set("mlp_bias", json!(self.has("blk.0.ffn_gate.bias")));
        }
        for (key, entry) in [
            ("bos_token_id", "tokenizer.ggml.bos_token_id"),
            ("eos_token_id", "tokenizer.ggml.eos_token_id"),
            ("pad_token_id", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some(id) = self.count(entry)? {
                set(key, json!(id));
            }
        }
        Ok(Value::Object(config))
    }

    fn rope_scaling(&self, theta: f64) -> Result<Option<Value>, GgufError> {
        if self.has("rope_freqs.weight") {
            return self.llama3_scaling(theta).map(Some);
        }
        let kind = self.text(&self.key("rope.scaling.type"))?;
        let factor = self.float(&self.key("rope.scaling.factor"))?;
        let original = self.count(&self.key("rope.scaling.original_context_length"))?;
        match (kind, factor) {
            (None | Some("none"), _) => Ok(None),
            (Some("linear"), Some(factor)) => {
                Ok(Some(json!({ "rope_type": "linear", "factor": factor })))
            }
            (Some("yarn"), Some(factor)) => {
                let mut yarn = json!({ "rope_type": "yarn", "factor": factor });
                if let Some(original) = original {
                    yarn["original_max_position_embeddings"] = json!(original);
                }
                Ok(Some(yarn))
            }
            (Some("linear" | "yarn"), None) => {
                let key = self.key("rope.scaling.factor");
                Err(self.metadata_error(&key, "a number"))
            }
            (Some(kind), _) => Err(self.unsupported(format!("the rope scaling `{kind}`"))),
        }
    }

    /// Files have the factors of Llama 3 as a table only. The largest is the `factor`; the other settings are the same in
    /// all of Meta's models, which the table is compared with.
    fn llama3_scaling(&self, theta: f64) -> Result<Value, GgufError> {
        let stored = self.stored_f32("rope_freqs.weight")?;
        let fault = |source| self.tensor_error("rope_freqs.weight", source);
        let table = stored
            .flatten_all()
            .and_then(|table| table.to_vec1::<f32>());
        let table = table.map_err(fault)?;
        let (low, high, original) = (1.0f64, 4.0f64, 8192.0f64);
        let factor = table.iter().copied().fold(1f32, f32::max);
        let head_dim = self.dimensions.head_dim;
        let expected = |i: usize| -> f32 {
            let wavelength = theta.powf((2 * i) as f64 / head_dim as f64) * std::f64::consts::TAU;
            let smooth = (original / wavelength - low) / (high - low);
            let smooth = smooth.clamp(0.0, 1.0);
            (1.0 / ((1.0 - smooth) / f64::from(factor) + smooth)) as f32
        };
        let near = |(i, x): (usize, &f32)| (x / expected(i) - 1.0).abs() <= FACTOR_TOLERANCE;
        if table.len() != head_dim / 2 || !table.iter().enumerate().all(near) {
            let what = "a table `rope_freqs.weight` that is not Llama 3's".to_string();
            return Err(self.unsupported(what));
        }
        Ok(json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original as u64,
        }))
    }
}
