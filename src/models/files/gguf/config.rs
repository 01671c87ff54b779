//! `config.json` from the metadata of a GGUF file.

use super::GgufError;
use super::file::GgufFile;
use super::metadata::Dimensions;
use super::names::Architecture;
use serde_json::{Map, Value, json};

/// Largest relative difference between the factors of `rope_freqs.weight` (f32) and those of the formula.
const FACTOR_TOLERANCE: f32 = 1e-3;

impl GgufFile {
    /// The `config.json` of this model, as transformers reads it.
    ///
    /// # Errors
    /// [`GgufError`] for metadata that are missing or that a `config.json` cannot express.
    pub fn config(&self) -> Result<Value, GgufError> {
        let Dimensions {
            layers,
            hidden,
            intermediate,
            heads,
            kv_heads,
            head_dim,
        } = self.dimensions;
        let metadata = &self.metadata;
        let window = metadata.count(".attention.sliding_window")?;
        let window = window.filter(|&window| window > 0);
        let (class, model_type) = match self.architecture {
            // Only Mistral's models have a window.
            Architecture::Llama if window.is_some() => ("MistralForCausalLM", "mistral"),
            Architecture::Llama => ("LlamaForCausalLM", "llama"),
            Architecture::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Architecture::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
        };
        let epsilon_key = ".attention.layer_norm_rms_epsilon";
        let epsilon = metadata.float(epsilon_key)?.filter(|x| *x > 0.0);
        let epsilon = epsilon.ok_or_else(|| metadata.error(epsilon_key, "a number above 0"))?;
        let theta = metadata.float(".rope.freq_base")?.unwrap_or(10000.0);
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
        if let Some(length) = metadata.count(".context_length")? {
            set("max_position_embeddings", json!(length));
        }
        if let Some(scaling) = self.rope_scaling(theta)? {
            set("rope_scaling", scaling);
        }
        if let Some(window) = window {
            set("sliding_window", json!(window));
        }
        if self.architecture != Architecture::Qwen2 {
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
            if let Some(id) = metadata.count(entry)? {
                set(key, json!(id));
            }
        }
        Ok(Value::Object(config))
    }

    fn rope_scaling(&self, theta: f64) -> Result<Option<Value>, GgufError> {
        if self.has("rope_freqs.weight") {
            return self.llama3_scaling(theta).map(Some);
        }
        let metadata = &self.metadata;
        let factor_key = ".rope.scaling.factor";
        let kind = match metadata.text(".rope.scaling.type")? {
            None | Some("none") => return Ok(None),
            Some(kind @ ("linear" | "yarn")) => kind,
            Some(kind) => return Err(metadata.unsupported(format!("the rope scaling `{kind}`"))),
        };
        let factor = metadata.float(factor_key)?;
        let factor = factor.ok_or_else(|| metadata.error(factor_key, "a number"))?;
        let mut scaling = json!({ "rope_type": kind, "factor": factor });
        let original = metadata.count(".rope.scaling.original_context_length")?;
        if let (Some(original), "yarn") = (original, kind) {
            scaling["original_max_position_embeddings"] = json!(original);
        }
        Ok(Some(scaling))
    }

    /// Files have the factors of Llama 3 as a table only. The largest is the `factor`; the other settings are the same in
    /// all of Meta's models, which the table is compared with.
    fn llama3_scaling(&self, theta: f64) -> Result<Value, GgufError> {
        let stored = self.stored_f32("rope_freqs.weight")?;
        let table = stored
            .flatten_all()
            .and_then(|table| table.to_vec1::<f32>())
            .map_err(|source| self.tensor_error("rope_freqs.weight", source))?;
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
            return Err(self.metadata.unsupported(what));
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
