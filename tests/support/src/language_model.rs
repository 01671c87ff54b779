//! The folder of a small language model with a tokenizer, to train and to run.

use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Tokens of the model; the tokenizer has fewer.
pub const VOCAB: usize = 256;

/// Its `config.json`, with so many tokens.
pub fn config(vocab: usize) -> Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64, "tie_word_embeddings": true,
        "torch_dtype": "float32", "eos_token_id": 1,
    })
}

/// Every byte of printable ASCII is a token.
pub(crate) fn tokenizer() -> Value {
    let letters = (' '..='~').map(|c| if c == ' ' { 'Ġ' } else { c });
    let tokens = ["<s>", "</s>"].map(String::from).into_iter();
    let tokens = tokens.chain(letters.chain(['Ċ']).map(String::from));
    let vocab: serde_json::Map<_, _> = tokens.enumerate().map(|(i, t)| (t, json!(i))).collect();
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true });
    let special = |id: usize, content: &str| {
        json!({ "id": id, "content": content, "single_word": false, "lstrip": false,
            "rstrip": false, "normalized": false, "special": true })
    };
    json!({
        "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
        "added_tokens": [special(0, "<s>"), special(1, "</s>")],
        "pre_tokenizer": bytes, "post_processor": null, "decoder": bytes,
        "model": { "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [] },
    })
}

/// A value for each element of the parameter `name`, the `number`th of its model: norms near 1, all else small.
pub fn values(name: &str, number: usize, count: usize) -> Vec<f32> {
    let value = |i: usize| match name.contains("norm") {
        true => 1. + 0.1 * ((i * 7 + number) as f32).sin(),
        false => 0.15 * ((i * 31 + number * 17) as f32 * 0.7).sin(),
    };
    (0..count).map(value).collect()
}

fn parameters() -> Vec<(String, Vec<usize>)> {
    let mut all = vec![
        ("model.embed_tokens.weight".to_string(), vec![VOCAB, 32]),
        ("model.norm.weight".to_string(), vec![32]),
    ];
    for layer in 0..2 {
        let own: [(&str, &[usize]); 9] = [
            ("input_layernorm", &[32]),
            ("post_attention_layernorm", &[32]),
            ("self_attn.q_proj", &[32, 32]),
            ("self_attn.k_proj", &[16, 32]),
            ("self_attn.v_proj", &[16, 32]),
            ("self_attn.o_proj", &[32, 32]),
            ("mlp.gate_proj", &[64, 32]),
            ("mlp.up_proj", &[64, 32]),
            ("mlp.down_proj", &[32, 64]),
        ];
        let own = own.map(|(name, shape)| {
            (
                format!("model.layers.{layer}.{name}.weight"),
                shape.to_vec(),
            )
        });
        all.extend(own);
    }
    all.sort();
    all
}

/// The text in the folder of [`write`].
pub fn text(dir: &Path) -> PathBuf {
    dir.join("text.txt")
}

/// Writes model, tokenizer and a text into `dir`.
pub fn write(dir: &Path) {
    let file = |name: &str, json: Value| {
        std::fs::write(dir.join(name), json.to_string()).expect("written")
    };
    let tensors = parameters()
        .into_iter()
        .enumerate()
        .map(|(number, (name, shape))| {
            let values = values(&name, number, shape.iter().product());
            let tensor = Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor");
            (name, tensor)
        });
    let tensors: HashMap<String, Tensor> = tensors.collect();
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors")).expect("saved");
    file("config.json", config(VOCAB));
    file("tokenizer.json", tokenizer());
    file("tokenizer_config.json", json!({ "eos_token": "</s>" }));
    std::fs::write(text(dir), "a small text, again and again. ".repeat(60)).expect("written");
}
