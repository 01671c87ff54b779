//! A request gets what it gets alone, whoever shares its batch.

use candle_core::{DType, Device, Tensor};
use fp8::load::Checkpoint;
use fp8::models::{CausalLm, Error, GenerationOptions, Llama, Model, ModelOptions, generate, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use fp8::serving::{Server, ServerOptions};
use fp8_core::Granularity;
use fp8_test_support::{bits, normal};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

const HIDDEN: usize = 128;
const INTERMEDIATE: usize = 256;
const VOCABULARY: usize = 512;

const EXPERTS: usize = 4;

/// The folder of a Llama of two layers with random weights; `more` is added to its configuration.
fn write(folder: &Path, more: Value) {
    let mut tensors = HashMap::new();
    let mut add = |name: String, dims: &[usize]| {
        let random = normal(tensors.len() as u64, dims);
        let random = random.to_device(&Device::Cpu).expect("on the CPU");
        let values = match dims {
            [_] => random.affine(0.1, 1.).expect("a scale"),
            [_, inputs, ..] => (random / (*inputs as f64).sqrt()).expect("a weight"),
            [] => unreachable!("no parameter is a scalar"),
        };
        tensors.insert(name, values.to_dtype(DType::BF16).expect("rounded"));
    };
    add("model.embed_tokens.weight".into(), &[VOCABULARY, HIDDEN]);
    add("model.norm.weight".into(), &[HIDDEN]);
    for layer in 0..2 {
        let mut part = |name: &str, dims: &[usize]| {
            add(format!("model.layers.{layer}.{name}.weight"), dims);
        };
        part("input_layernorm", &[HIDDEN]);
        part("post_attention_layernorm", &[HIDDEN]);
        part("self_attn.q_norm", &[HIDDEN / 8]);
        part("self_attn.k_norm", &[HIDDEN / 8]);
        part("self_attn.q_proj", &[HIDDEN, HIDDEN]);
        part("self_attn.k_proj", &[HIDDEN / 2, HIDDEN]);
        part("self_attn.v_proj", &[HIDDEN / 2, HIDDEN]);
        part("self_attn.o_proj", &[HIDDEN, HIDDEN]);
        if more["model_type"] == "qwen3_moe" {
            part("mlp.gate", &[EXPERTS, HIDDEN]);
            for e in 0..EXPERTS {
                part(
                    &format!("mlp.experts.{e}.gate_proj"),
                    &[INTERMEDIATE, HIDDEN],
                );
                part(&format!("mlp.experts.{e}.up_proj"), &[INTERMEDIATE, HIDDEN]);
                part(
                    &format!("mlp.experts.{e}.down_proj"),
                    &[HIDDEN, INTERMEDIATE],
                );
            }
            continue;
        }
        part("mlp.gate_proj", &[INTERMEDIATE, HIDDEN]);
        part("mlp.up_proj", &[INTERMEDIATE, HIDDEN]);
        part("mlp.down_proj", &[HIDDEN, INTERMEDIATE]);
    }
    let mut config = json!({
        "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu",
        "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": 2, "head_dim": HIDDEN / 8,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": VOCABULARY,
        "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": true,
    });
    let entries = config.as_object_mut().expect("an object");
    entries.extend(more.as_object().expect("an object").clone());
    std::fs::write(folder.join("config.json"), config.to_string()).expect("written");
    candle_core::safetensors::save(&tensors, folder.join("model.safetensors")).expect("written");
}

/// The model in high precision of `dtype`, or quantized.
fn model(scheme: Option<Scheme>, dtype: DType, more: Value) -> Arc<Llama> {
    let folder = tempfile::tempdir().expect("a folder");
    write(folder.path(), more);
    let target = folder.path().join("fp8");
    let folder = match scheme {
        None => folder.path(),
        Some(scheme) => {
            let source = Checkpoint::open_dir(folder.path()).expect("a checkpoint");
            let options = QuantizeOptions::new(scheme);
            rewrite::quantize(&source, &target, &options, &mut rewrite::quiet).expect("FP8");
            &target
        }
    };
    let options = ModelOptions::new().with_dtype(dtype);
    match open(folder, &options).expect("a model") {
        Model::Llama(model) => Arc::new(model),
        _ => panic!("it is a Llama"),
    }
}

fn models() -> Vec<(&'static str, Arc<Llama>)> {
    let plain = json!({});
    let windowed = json!({ "model_type": "qwen3", "use_sliding_window": true, "sliding_window": 12, "max_window_layers": 1 });
    let experts = json!({ "model_type": "qwen3_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "norm_topk_prob": true,
        "moe_intermediate_size": INTERMEDIATE });
    // Prompts and texts of the requests are shorter and longer than the original length.
    let long = json!({ "rope_scaling": { "rope_type": "longrope", "original_max_position_embeddings": 24,
        "short_factor": vec![1.; HIDDEN / 16], "long_factor": vec![4.; HIDDEN / 16] } });
    let weights = Scheme::WeightOnly {
        granularity: Granularity::Rowwise,
    };
    vec![
        ("f32", model(None, DType::F32, plain.clone())),
        ("bf16", model(None, DType::BF16, plain.clone())),
        ("a window", model(None, DType::F32, windowed)),
        ("longrope", model(None, DType::F32, long)),
        ("experts", model(None, DType::F32, experts.clone())),
        (
            "experts by channel",
            model(Some(Scheme::ChannelToken), DType::F32, experts),
        ),
        (
            "channel",
            model(Some(Scheme::ChannelToken), DType::F32, plain.clone()),
        ),
        (
            "block",
            model(Some(Scheme::Block128), DType::F32, plain.clone()),
        ),
        ("mx", model(Some(Scheme::Mxfp8), DType::F32, plain.clone())),
        (
            "one scale",
            model(Some(Scheme::DynamicTensor), DType::F32, plain.clone()),
        ),
        ("weights only", model(Some(weights), DType::F32, plain)),
    ]
}

fn prompt(request: usize, tokens: usize) -> Vec<u32> {
    let id = |i: usize| ((request * 131 + i * 37) % VOCABULARY) as u32;
    (0..tokens).map(id).collect()
}

/// Requests of all lengths; some sample.
fn requests() -> Vec<(Vec<u32>, GenerationOptions)> {
    let lengths = [3, 1, 20, 3, 40, 9, 64, 2];
    let request = |(i, tokens): (usize, usize)| {
        let options = GenerationOptions::default().with_max_new_tokens(8 + 3 * i);
        let options = match i % 3 {
            0 => options,
            1 => options.with_temperature(0.9).with_seed(i as u64),
            _ => options.with_repetition_penalty(1.2, Some(10)),
        };
        (prompt(i, tokens), options)
    };
    lengths.into_iter().enumerate().map(request).collect()
}

/// Also with prompts that are read in parts, unless one scale spans a whole prompt.
#[test]
fn tokens_are_those_of_generate_alone() -> fp8::models::Result<()> {
    for (name, model) in models() {
        let requests = requests();
        let alone = |(prompt, options): &(Vec<u32>, GenerationOptions)| {
            let mut go_on = |_| ControlFlow::Continue(());
            let mut alone = generate(&*model, std::slice::from_ref(prompt), options, &mut go_on)?;
            let alone = alone.remove(0);
            Ok((alone.tokens, alone.finish))
        };
        let alone: Vec<_> = requests
            .iter()
            .map(alone)
            .collect::<fp8::models::Result<_>>()?;
        let parts = [64, 7].into_iter();
        for part in parts.filter(|&part| part == 64 || name != "one scale") {
            let options = ServerOptions::default().with_prompt_part(part);
            let server = Server::start(model.clone(), &options).expect("a server");
            let submit = |(prompt, options): &(Vec<u32>, GenerationOptions)| {
                server.submit(prompt.clone(), options).expect("room")
            };
            let replies: Vec<_> = requests.iter().map(submit).collect();
            for (reply, alone) in replies.into_iter().zip(&alone) {
                let (_, tokens, finish) = reply.wait().expect("tokens");
                assert_eq!((&tokens, finish), (&alone.0, alone.1), "{name}");
            }
        }
    }
    Ok(())
}

/// Also with prompts that are read in parts.
#[test]
fn tokens_do_not_depend_on_the_others() {
    for (name, model) in models() {
        let options = ServerOptions::default().with_prompt_part(16);
        let server = Server::start(model, &options).expect("a server");
        let requests = requests();
        let submit = |(prompt, options): &(Vec<u32>, GenerationOptions)| {
            server.submit(prompt.clone(), options).expect("room")
        };
        let replies: Vec<_> = requests.iter().map(submit).collect();
        let together = replies
            .into_iter()
            .map(|reply| reply.wait().expect("tokens").1);
        let together: Vec<Vec<u32>> = together.collect();
        for (request, together) in requests.iter().zip(together) {
            let alone = submit(request).wait().expect("tokens").1;
            assert_eq!(together, alone, "{name}");
        }
    }
}

/// Twelve sequences, more than are computed together, against each alone.
#[test]
fn logits_of_a_step_are_those_of_each_row_alone() -> fp8::models::Result<()> {
    for (name, model) in models() {
        let begin = |row: usize| -> fp8::models::Result<_> {
            let mut cache = model.new_cache(1, 100)?;
            let ids = prompt(row, 1 + row * 5);
            let ids = Tensor::from_vec(ids, (1, 1 + row * 5), &Device::Cpu)?;
            model.last_logits(&ids, &mut cache)?;
            Ok(cache)
        };
        let mut caches = (0..12).map(begin).collect::<Result<Vec<_>, _>>()?;
        let mut alone = (0..12).map(begin).collect::<Result<Vec<_>, _>>()?;
        for step in 0..3 {
            let ids = prompt(step, 12);
            let logits = model.step(&ids, &mut caches.iter_mut().collect::<Vec<_>>())?;
            assert_eq!(logits.dims(), [12, VOCABULARY]);
            for (row, cache) in alone.iter_mut().enumerate() {
                let id = Tensor::from_slice(&ids[row..=row], (1, 1), &Device::Cpu)?;
                let expected = model.last_logits(&id, cache)?;
                let logits = logits.narrow(0, row, 1)?;
                assert!(bits(&logits) == bits(&expected), "{name}: row {row}");
            }
        }
        assert_eq!(caches[3].len(), 1 + 3 * 5 + 3);
    }
    Ok(())
}

#[test]
fn steps_that_do_not_fit_change_nothing() -> fp8::models::Result<()> {
    let model = model(None, DType::F32, json!({}));
    let mut full = model.new_cache(1, 1)?;
    let mut free = model.new_cache(1, 9)?;
    model.step(&[1, 2], &mut [&mut full, &mut free])?;
    let error = model.step(&[1, 2], &mut [&mut free, &mut full]);
    assert!(error.expect_err("no room").to_string().contains("room"));
    assert_eq!(free.len(), 1);
    let mut two = model.new_cache(2, 4)?;
    for result in [
        model.step(&[1], &mut [&mut two]),
        model.step(&[1, 2], &mut [&mut free]),
        model.step(&[], &mut []),
    ] {
        let error = result.expect_err("no row for each sequence");
        assert!(matches!(error, Error::CacheMismatch { .. }), "{error}");
    }
    let error = model.step(&[VOCABULARY as u32], &mut [&mut free]);
    let error = error.expect_err("no token");
    assert!(matches!(error, Error::TokenIds { .. }), "{error}");
    assert_eq!(free.len(), 1);
    Ok(())
}
