//! The folder of a small encoder with a tokenizer, and texts to train it on.

use crate::language_model;
use candle_core::{Device, Tensor};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Its `config.json`.
pub fn config() -> Value {
    json!({
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "vocab_size": 112, "max_position_embeddings": 24, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12, "pad_token_id": 1,
    })
}

/// Every parameter of `BertModel`, the pooler too.
fn parameters() -> BTreeMap<String, Vec<usize>> {
    let mut all = BTreeMap::new();
    let mut add = |name: &str, shape: &[usize]| {
        all.insert(format!("{name}.weight"), shape.to_vec());
        if !name.ends_with("embeddings") {
            all.insert(format!("{name}.bias"), shape[..1].to_vec());
        }
    };
    add("embeddings.word_embeddings", &[112, 32]);
    add("embeddings.position_embeddings", &[24, 32]);
    add("embeddings.token_type_embeddings", &[2, 32]);
    add("embeddings.LayerNorm", &[32]);
    add("pooler.dense", &[32, 32]);
    for layer in 0..2 {
        let own: [(&str, &[usize]); 8] = [
            ("attention.self.query", &[32, 32]),
            ("attention.self.key", &[32, 32]),
            ("attention.self.value", &[32, 32]),
            ("attention.output.dense", &[32, 32]),
            ("attention.output.LayerNorm", &[32]),
            ("intermediate.dense", &[64, 32]),
            ("output.dense", &[32, 64]),
            ("output.LayerNorm", &[32]),
        ];
        for (name, shape) in own {
            add(&format!("encoder.layer.{layer}.{name}"), shape);
        }
    }
    all
}

fn value(name: &str, number: usize, i: usize) -> f32 {
    match name.ends_with("LayerNorm.weight") {
        true => 1. + 0.1 * ((i * 7 + number) as f32).sin(),
        false => 0.15 * ((i * 31 + number * 17) as f32 * 0.7).sin(),
    }
}

/// Lines of JSON in `dir`.
pub fn lines(dir: &Path, name: &str, lines: impl IntoIterator<Item = Value>) -> PathBuf {
    let path = dir.join(name);
    let lines = lines.into_iter().map(|line| format!("{line}\n"));
    std::fs::write(&path, lines.collect::<String>()).expect("written");
    path
}

/// The words of a class of texts.
const WORDS: [[&str; 4]; 2] = [
    ["red", "rose", "warm", "fire"],
    ["ice", "blue", "snow", "cold"],
];

/// Four words of a class.
fn text(class: usize, number: usize) -> String {
    let word = |place: usize| WORDS[class][(number * 3 + place * (number % 3 + 1)) % 4];
    [0, 1, 2].map(word).join(" ")
}

/// Texts of two classes, `warm` and `cold`.
pub fn labelled(dir: &Path) -> PathBuf {
    let line = |i: usize| json!({ "text": text(i % 2, i / 2), "label": (["warm", "cold"][i % 2]) });
    lines(dir, "labelled.jsonl", (0..60).map(line))
}

/// Queries, each with a text of the same class and, if `negative`, one of the other.
pub fn queries(dir: &Path, negative: bool) -> PathBuf {
    let line = |i: usize| {
        let mut line = json!({ "query": text(i % 2, i), "positive": text(i % 2, i + 5) });
        if negative {
            line["negative"] = text(1 - i % 2, i + 2).into();
        }
        line
    };
    lines(dir, "queries.jsonl", (0..60).map(line))
}

/// Writes model and tokenizer into `dir`.
pub fn write(dir: &Path) {
    let file = |name: &str, json: Value| {
        std::fs::write(dir.join(name), json.to_string()).expect("written")
    };
    let parameters = parameters().into_iter().enumerate();
    let tensors = parameters.map(|(number, (name, shape))| {
        let count = shape.iter().product();
        let values = (0..count).map(|i| value(&name, number, i)).collect();
        let tensor: Tensor = Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor");
        (name, tensor)
    });
    let tensors: HashMap<String, Tensor> = tensors.collect();
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors")).expect("saved");
    file("config.json", config());
    // `<s>` begins a text, as `[CLS]` does, and `</s>` ends it.
    let mut tokenizer = language_model::tokenizer();
    let special = |id: usize, token: &str| json!({ "id": token, "ids": [id], "tokens": [token] });
    let part = |name: &str, id: &str| json!({ name: { "id": id, "type_id": 0 } });
    let pair = json!([part("Sequence", "A"), part("Sequence", "B")]);
    tokenizer["post_processor"] = json!({
        "type": "TemplateProcessing",
        "single": [part("SpecialToken", "<s>"), part("Sequence", "A"), part("SpecialToken", "</s>")],
        "pair": pair,
        "special_tokens": { "<s>": special(0, "<s>"), "</s>": special(1, "</s>") },
    });
    file("tokenizer.json", tokenizer);
    file("tokenizer_config.json", json!({ "eos_token": "</s>" }));
    std::fs::create_dir(dir.join("1_Pooling")).expect("made");
    file(
        "1_Pooling/config.json",
        json!({ "word_embedding_dimension": 32, "pooling_mode_mean_tokens": true }),
    );
    file(
        "modules.json",
        json!([{ "idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer" }]),
    );
}
