//! A small language model in a folder, with a tokenizer and a text.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::RecipeName;
use fp8::models::{Llama, LlamaConfig, Tokenizer};
use fp8::optim::LrSchedule;
use fp8::training::{
    Dataset, DatasetOptions, Learner, NextToken, StepRecord, TrainableModel, Trainer, TrainerConfig,
};
use serde_json::json;
use std::path::{Path, PathBuf};

pub type Outcome = Result<(), Box<dyn std::error::Error>>;

pub const VOCAB: usize = 256;

/// Every other byte is a token of its own.
fn tokenizer() -> serde_json::Value {
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

pub fn config(vocab: usize) -> LlamaConfig {
    LlamaConfig::parse("config.json", &config_json(vocab)).expect("a configuration")
}

fn config_json(vocab: usize) -> serde_json::Value {
    json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": vocab,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64, "tie_word_embeddings": true,
        "torch_dtype": "float32", "eos_token_id": 1,
    })
}

/// Deterministic values in place of the random ones of new variables.
pub fn fill(vars: &VarMap) {
    let vars = vars.data().lock().expect("a lock");
    let mut names: Vec<_> = vars.iter().collect();
    names.sort_by_key(|(name, _)| *name);
    for (number, (name, var)) in names.into_iter().enumerate() {
        let values: Vec<f32> = (0..var.elem_count())
            .map(|i| match name.contains("norm") {
                true => 1. + 0.1 * ((i * 7 + number) as f32).sin(),
                false => 0.15 * ((i * 31 + number * 17) as f32 * 0.7).sin(),
            })
            .collect();
        let values = Tensor::from_vec(values, var.shape(), &Device::Cpu).expect("a tensor");
        var.set(&values).expect("set");
    }
}

pub fn model(vocab: usize) -> (Llama, VarMap) {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    let model = Llama::new(&config(vocab), vb).expect("a model");
    fill(&vars);
    (model, vars)
}

/// Makes the folder of a model.
pub fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().expect("a folder");
    let write = |name: &str, json: serde_json::Value| {
        std::fs::write(dir.path().join(name), json.to_string()).expect("written")
    };
    let (_, vars) = model(VOCAB);
    vars.save(dir.path().join("model.safetensors"))
        .expect("saved");
    write("config.json", config_json(VOCAB));
    write("tokenizer.json", tokenizer());
    write("tokenizer_config.json", json!({ "eos_token": "</s>" }));
    std::fs::write(
        text(dir.path()),
        "a small text, again and again. ".repeat(60),
    )
    .expect("written");
    dir
}

pub fn text(dir: &Path) -> PathBuf {
    dir.join("text.txt")
}

pub fn objective(dir: &Path) -> NextToken {
    let tokenizer = Tokenizer::open(dir).expect("a tokenizer");
    let data = Dataset::open(&[text(dir)], &tokenizer, &DatasetOptions::new(16)).expect("data");
    NextToken::new(data, 4).expect("an objective")
}

/// The settings of a run under a recipe, or `f32`.
pub fn settings(recipe: &str, micro_batches: usize) -> TrainerConfig {
    let recipe = match recipe {
        "f32" => None,
        name => Some(name.parse::<RecipeName>().expect("a recipe").into()),
    };
    TrainerConfig::new(LrSchedule::cosine(3e-3, 2, 12))
        .with_recipe(recipe)
        .with_micro_batches(micro_batches)
}

pub type Run = Trainer<fp8::models::Model, NextToken>;

pub fn full(dir: &Path, config: TrainerConfig) -> Run {
    let base = TrainableModel::open(dir, DType::F32, &Device::Cpu).expect("a model");
    Trainer::new("run", base.model, base.vars, objective(dir), config).expect("a trainer")
}

/// Makes steps until `last`.
pub fn steps(run: &mut Run, last: u64) -> fp8::training::Result<Vec<StepRecord>> {
    let mut records = vec![];
    while run.step() < last {
        run.train_step()?;
        records.extend(run.read_steps()?);
    }
    Ok(records)
}

pub fn losses(records: &[StepRecord]) -> Vec<u64> {
    records.iter().map(|record| record.loss.to_bits()).collect()
}
