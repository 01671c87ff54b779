//! `config.json` from the metadata of a GGUF file.

use super::GgufError;
use super::file::GgufFile;
use super::metadata::Dimensions;
use super::names::Architecture;
use serde_json::{Map, Value, json};

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
        self.refuse_others()?;
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
        let biased = |part: &str| self.has(&format!("blk.0.{part}.bias"));
        if self.architecture != Architecture::Qwen2 {
            set("attention_bias", json!(biased("attn_q")));
        }
        if self.architecture == Architecture::Llama {
            set("mlp_bias", json!(biased("ffn_gate")));
        }
        for (key, entry) in [
            ("bos_token_id", "tokenizer.ggml.bos_token_id"),
            ("pad_token_id", "tokenizer.ggml.padding_token_id"),
        ] {
            if let Some(id) = metadata.count(entry)? {
                set(key, json!(id));
            }
        }
        let ends = match self.end_tokens()?.as_slice() {
            [] => None,
            [id] => Some(json!(id)),
            ids => Some(json!(ids)),
        };
        if let Some(ends) = ends {
            set("eos_token_id", ends);
        }
        Ok(Value::Object(config))
    }

    /// The tokens that end a text, or by entries of their own a turn or a message. llama.cpp finds others by their text, too.
    ///
    /// # Errors
    /// [`GgufError`] for an entry of another kind.
    pub(crate) fn end_tokens(&self) -> Result<Vec<u32>, GgufError> {
        let mut ids = vec![];
        for name in ["eos", "eot", "eom"] {
            let id = self
                .metadata
                .count(&format!("tokenizer.ggml.{name}_token_id"))?;
            // Below 2^31.
            let id = id.and_then(|id| u32::try_from(id).ok());
            ids.extend(id.filter(|id| !ids.contains(id)));
        }
        Ok(ids)
    }

    /// Rejects entries and biases that would change what the model computes and that its `config.json` has no place for.
    fn refuse_others(&self) -> Result<(), GgufError> {
        let metadata = &self.metadata;
        // llama.cpp takes 0 for "none" in all of them, and a scale of 1 has no effect.
        for (key, usual) in [
            (".logit_scale", [0.0, 1.0]),
            (".residual_scale", [0.0, 1.0]),
            (".embedding_scale", [0.0, 1.0]),
            (".attn_logit_softcapping", [0.0, 0.0]),
            (".final_logit_softcapping", [0.0, 0.0]),
            (".attention.clamp_kqv", [0.0, 0.0]),
            (".attention.temperature_scale", [0.0, 0.0]),
        ] {
            let value = metadata.float(key)?;
            if value.is_some_and(|value| !usual.contains(&value)) {
                return Err(metadata.error(key, "no entry, or one without effect"));
            }
        }
        let key = ".attention.scale";
        let usual = 1.0 / (self.dimensions.head_dim as f64).sqrt();
        let is_other = |value: f64| value != 0.0 && (value / usual - 1.0).abs() > 1e-6;
        if metadata.float(key)?.is_some_and(is_other) {
            return Err(metadata.error(key, "1 over the root of the features of a head"));
        }
        let key = ".attention.causal";
        if metadata.flag(key)? == Some(false) {
            return Err(metadata.error(key, "true"));
        }
        // A `config.json` says for all layers at once which biases there are; those of the first one decide.
        let biased = |part: &str| self.has(&format!("blk.0.{part}.bias"));
        let output = self.architecture != Architecture::Qwen2 && biased("attn_q");
        let attention = self.architecture == Architecture::Qwen2 || output;
        let mlp = self.architecture == Architecture::Llama && biased("ffn_gate");
        for layer in 0..self.dimensions.layers {
            for (part, is_read) in [
                ("attn_q", attention),
                ("attn_k", attention),
                ("attn_v", attention),
                ("attn_output", output),
                ("ffn_gate", mlp),
                ("ffn_up", mlp),
                ("ffn_down", mlp),
            ] {
                let name = format!("blk.{layer}.{part}.bias");
                if self.has(&name) && !is_read {
                    let what = format!("`{name}` without the biases beside it");
                    return Err(metadata.unsupported(what));
                }
            }
        }
        Ok(())
    }
}
