//! The number of threads changes neither logits (prompts, cached steps and few rows of FP8 weights, and a bf16 embedding) nor the codes
//! that a search finds.

use candle_core::{DType, Device, Tensor};
use fp8::load::Checkpoint;
use fp8::models::{self, CausalLm, ModelOptions, find_codes};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use fp8_files::search::SearchOptions;
use fp8_test_support::child::{child, from_parent};
use fp8_test_support::{bits, normal};
use serde_json::json;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

const HIDDEN: usize = 256;
const INTERMEDIATE: usize = 640;
const VOCABULARY: usize = 2048;

/// A two-layer Llama in bf16, large enough for its products and its attention to be divided among threads.
fn write(folder: &Path) -> PathBuf {
    let mut tensors = HashMap::new();
    let mut add = |name: String, dims: &[usize]| {
        let seed = tensors.len() as u64;
        let random = normal(seed, dims).to_device(&Device::Cpu).unwrap();
        let values = match dims {
            [_] => random.affine(0.1, 1.).unwrap(),
            [_, inputs, ..] => (random / (*inputs as f64).sqrt()).unwrap(),
            [] => unreachable!("no parameter is a scalar"),
        };
        tensors.insert(name, values.to_dtype(DType::BF16).unwrap());
    };
    add("model.embed_tokens.weight".into(), &[VOCABULARY, HIDDEN]);
    add("model.norm.weight".into(), &[HIDDEN]);
    for layer in 0..2 {
        let mut part = |name: &str, dims: &[usize]| {
            add(format!("model.layers.{layer}.{name}.weight"), dims);
        };
        part("input_layernorm", &[HIDDEN]);
        part("post_attention_layernorm", &[HIDDEN]);
        part("self_attn.q_proj", &[HIDDEN, HIDDEN]);
        part("self_attn.k_proj", &[HIDDEN / 2, HIDDEN]);
        part("self_attn.v_proj", &[HIDDEN / 2, HIDDEN]);
        part("self_attn.o_proj", &[HIDDEN, HIDDEN]);
        part("mlp.gate_proj", &[INTERMEDIATE, HIDDEN]);
        part("mlp.up_proj", &[INTERMEDIATE, HIDDEN]);
        part("mlp.down_proj", &[HIDDEN, INTERMEDIATE]);
    }
    let source = folder.join("bf16");
    std::fs::create_dir(&source).unwrap();
    let config = json!({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    std::fs::write(source.join("config.json"), config.to_string()).unwrap();
    candle_core::safetensors::save(&tensors, source.join("model.safetensors")).unwrap();
    source
}

fn quantize(source: &Path, target: &Path, options: &QuantizeOptions) {
    let source = Checkpoint::open_dir(source).unwrap();
    rewrite::quantize(&source, target, options, &mut rewrite::quiet).unwrap();
}

#[test]
fn logits_do_not_depend_on_the_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("fp8");
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    quantize(&write(folder.path()), &target, &options);
    let model = models::open(&target, &ModelOptions::new()).unwrap();
    let model = model.llama().unwrap();
    let logits = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
        pool.build().unwrap().install(|| {
            let ids = |from: u32, tokens: u32| {
                let ids = (from..from + tokens).map(|i| i * 7919 % VOCABULARY as u32);
                Tensor::from_iter(ids, &Device::Cpu)
                    .unwrap()
                    .reshape((1, tokens as usize))
                    .unwrap()
            };
            let mut all = vec![];
            let mut cache = model.new_cache(1, 256).unwrap();
            for (from, tokens) in [(0, 200), (200, 1), (201, 1), (202, 9), (211, 2)] {
                let logits = model.forward_cached(&ids(from, tokens), &mut cache);
                all.extend(bits(&logits.unwrap()));
            }
            all
        })
    };
    let one = logits(1);
    for threads in [2, 3, 5] {
        assert!(logits(threads) == one, "{threads} threads");
    }
}

/// The file that a child writes.
const FILE: &str = "FP8_TEST_FILE";

/// In processes of their own: a search computes with candle's products too, whose threads are those of the process.
#[test]
fn codes_of_a_search_do_not_depend_on_the_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path());
    let found = ["1", "3"].map(|threads| {
        let target = folder.path().join(threads);
        let mut child = child("threads::search");
        child.env("RAYON_NUM_THREADS", threads).env(FILE, &target);
        let output = child.output().unwrap();
        assert!(output.status.success(), "{threads} threads: {output:?}");
        std::fs::read(target.join("model.safetensors")).unwrap()
    });
    assert!(found[0] == found[1]);
}

#[test]
#[ignore = "run by codes_of_a_search_do_not_depend_on_the_number_of_threads in child processes"]
fn search() {
    let target = PathBuf::from(from_parent(FILE));
    let source = target.with_file_name("bf16");
    let checkpoint = Checkpoint::open_dir(&source).unwrap();
    let model = models::open(&source, &ModelOptions::new()).unwrap();
    let sample = |s: u32| (0..48).map(move |i| (s * 48 + i) * 7919 % VOCABULARY as u32);
    let samples: Vec<Vec<u32>> = (0..6).map(|s| sample(s).collect()).collect();
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let (search, quiet) = (SearchOptions::new(), &mut rewrite::quiet);
    let found = find_codes(&model, &checkpoint, &samples, &options, &search, quiet).unwrap();
    quantize(&source, &target, &options.with_chosen(found.chosen));
}
