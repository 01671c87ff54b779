//! Latent attention: Mistral's own names, layers that predict further tokens, rows that have seen different numbers of tokens, training,
//! and entries of configurations that are refused.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::models::{self, GenerationOptions, Llama, LlamaConfig, Model, ModelOptions};
use fp8_test_support::{assert_close, golden, sqnr};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::Path;

type Tensors = HashMap<String, Tensor>;

/// The tensors of a family in the goldens, and its configuration.
fn of_golden(family: &str) -> (Tensors, Value) {
    let path = golden("models.safetensors");
    let bytes = std::fs::read(&path).expect("the file");
    let (_, header) = safetensors::SafeTensors::read_metadata(&bytes).expect("a header");
    let config = &header.metadata().as_ref().expect("configurations")[family];
    let all = candle_core::safetensors::load(&path, &Device::Cpu).expect("tensors");
    let prefix = format!("{family}.");
    let own = all.into_iter().filter_map(|(name, tensor)| {
        let name = name.strip_prefix(&prefix)?.to_string();
        Some((name, tensor))
    });
    let config = serde_json::from_str(config).expect("a configuration");
    (own.collect(), config)
}

fn opened(dir: &Path, tensors: &Tensors, (name, config): (&str, &Value)) -> models::Result<Llama> {
    std::fs::write(dir.join(name), config.to_string()).expect("written");
    let file = match name {
        "params.json" => "consolidated.safetensors",
        _ => "model.safetensors",
    };
    candle_core::safetensors::save(tensors, dir.join(file)).expect("written");
    match models::open(dir, &ModelOptions::new().with_dtype(DType::F32))? {
        Model::Llama(model) => Ok(model),
        other => panic!("a language model is expected: {other:?}"),
    }
}

/// Mistral's name for one of transformers.
fn native(name: &str) -> String {
    let parts = [
        ("model.embed_tokens", "tok_embeddings"),
        ("model.layers", "layers"),
        ("model.norm", "norm"),
        ("lm_head", "output"),
        ("self_attn.q_a_proj", "attention.wq_a"),
        ("self_attn.q_a_layernorm", "attention.q_a_norm"),
        ("self_attn.q_b_proj", "attention.wq_b"),
        ("self_attn.kv_a_proj_with_mqa", "attention.wkv_a_with_mqa"),
        ("self_attn.kv_a_layernorm", "attention.kv_a_norm"),
        ("self_attn.kv_b_proj", "attention.wkv_b"),
        ("self_attn.o_proj", "attention.wo"),
        ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("mlp.gate.", "gate."),
        ("mlp.", ""),
        ("gate_proj", "w1"),
        ("down_proj", "w2"),
        ("up_proj", "w3"),
    ];
    let parts = parts.iter();
    parts.fold(name.to_string(), |name, (from, to)| name.replace(from, to))
}

/// Mistral-Large-3's names and `params.json`, with the numbers of transformers' Mistral 4.
#[test]
fn mistrals_own_files() {
    let (mut tensors, config) = of_golden("mistral4");
    let ids = tensors.remove("ids").expect("ids");
    let expected = tensors.remove("output").expect("an output");
    let mut renamed = Tensors::new();
    for (name, tensor) in tensors {
        let Some((path, own)) = name.split_once(".experts.") else {
            renamed.insert(native(&name), tensor);
            continue;
        };
        for expert in 0..tensor.dim(0).expect("experts") {
            let whole = tensor.get(expert).expect("an expert");
            let rows = whole.dim(0).expect("rows");
            let parts = match own {
                "gate_up_proj" => vec![("gate_proj", 0, rows / 2), ("up_proj", rows / 2, rows / 2)],
                _ => vec![("down_proj", 0, rows)],
            };
            for (part, first, rows) in parts {
                let tensor = whole.narrow(0, first, rows).expect("rows");
                let name = native(&format!("{path}.experts.{expert}.{part}.weight"));
                renamed.insert(name, tensor.contiguous().expect("a copy"));
            }
        }
    }
    let rope = &config["rope_parameters"];
    let params = json!({ "dim": config["hidden_size"], "n_layers": config["num_hidden_layers"], "n_heads": config["num_attention_heads"],
        "n_kv_heads": config["num_attention_heads"], "head_dim": 128, "hidden_dim": config["intermediate_size"], "norm_eps": 1e-6,
        "vocab_size": config["vocab_size"], "rope_theta": 10000.0, "max_position_embeddings": 64, "tied_embeddings": false,
        "q_lora_rank": config["q_lora_rank"], "kv_lora_rank": config["kv_lora_rank"], "v_head_dim": config["v_head_dim"],
        "qk_nope_head_dim": config["qk_nope_head_dim"], "qk_rope_head_dim": config["qk_rope_head_dim"],
        "llama_4_scaling": { "beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": rope["original_max_position_embeddings"] },
        "yarn": { "factor": rope["factor"], "original_max_position_embeddings": rope["original_max_position_embeddings"],
            "beta": 32, "alpha": 1, "apply_scale": false },
        "moe": { "num_experts": config["n_routed_experts"], "num_experts_per_tok": config["num_experts_per_tok"], "num_shared_experts": 1,
            "expert_hidden_dim": config["moe_intermediate_size"], "routed_scale": 1.0, "first_k_dense_replace": 0, "route_every_n": 1,
            "num_expert_groups": 1, "num_expert_groups_per_tok": 1 } });
    let dir = tempfile::tempdir().expect("a folder");
    let model = opened(dir.path(), &renamed, ("params.json", &params)).expect("a model");
    let close = sqnr(&expected, &model.forward(&ids).expect("logits"));
    println!("{close:.1} dB");
    assert!(close >= 110., "{close} dB");
}

/// DeepSeek-V3's files have a layer more than the model.
#[test]
fn layers_that_predict_further_tokens_are_not_loaded() {
    let (mut tensors, mut config) = of_golden("deepseek_v3");
    let ids = tensors.remove("ids").expect("ids");
    let expected = tensors.remove("output").expect("an output");
    let extra = tensors["model.layers.1.input_layernorm.weight"].clone();
    tensors.insert("model.layers.2.enorm.weight".into(), extra);
    config["num_nextn_predict_layers"] = json!(1);
    let dir = tempfile::tempdir().expect("a folder");
    let model = opened(dir.path(), &tensors, ("config.json", &config)).expect("a model");
    let close = sqnr(&expected, &model.forward(&ids).expect("logits"));
    assert!(close >= 110., "{close} dB");
    config["num_nextn_predict_layers"] = json!(0);
    let error = opened(dir.path(), &tensors, ("config.json", &config)).expect_err("a layer more");
    assert!(
        error.to_string().contains("model.layers.2.enorm.weight"),
        "{error}"
    );
}

/// Prompts of two lengths in one batch continue as each does alone.
#[test]
fn rows_of_different_lengths_continue_as_alone() {
    let (mut tensors, config) = of_golden("deepseek_v3");
    tensors.remove("ids");
    tensors.remove("output");
    let dir = tempfile::tempdir().expect("a folder");
    let model = opened(dir.path(), &tensors, ("config.json", &config)).expect("a model");
    let prompts = vec![vec![3u32, 9, 17, 4, 30], vec![12, 40]];
    let options = GenerationOptions::default()
        .with_max_new_tokens(6)
        .with_ignore_eos(true);
    let run = |prompts: &[Vec<u32>]| {
        let outputs =
            models::generate(
                &model,
                prompts,
                &options,
                &mut |_| ControlFlow::Continue(()),
            );
        outputs.expect("tokens")
    };
    let together = run(&prompts);
    assert_eq!(together.len(), prompts.len());
    for (prompt, together) in prompts.iter().zip(&together) {
        let alone = run(std::slice::from_ref(prompt));
        assert_eq!(alone[0].tokens, together.tokens);
    }
}

/// The gradient of every parameter that takes part, against finite differences of the loss.
#[test]
fn it_trains() -> Result<(), Box<dyn std::error::Error>> {
    let (_, config) = of_golden("deepseek_v3");
    let config = LlamaConfig::parse("config.json", &config)?;
    let vars = VarMap::new();
    let model = Llama::new(
        &config,
        VarBuilder::from_varmap(&vars, DType::F64, &Device::Cpu),
    )?;
    let ids = Tensor::new(&[[1u32, 5, 9, 2, 7]], &Device::Cpu)?;
    let loss = || -> Result<Tensor, Box<dyn std::error::Error>> {
        Ok(model.forward(&ids)?.sqr()?.mean_all()?)
    };
    let gradients = fp8::backward(&loss()?)?;
    let vars = vars.data().lock().expect("variables").clone();
    for name in [
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.self_attn.kv_b_proj.weight",
        "model.layers.0.self_attn.q_a_proj.weight",
        "model.layers.1.mlp.shared_experts.up_proj.weight",
    ] {
        let var = &vars[name];
        let gradient = gradients.get(var).expect(name);
        let direction = gradient.affine(1., 0.)?;
        let norm = direction.sqr()?.sum_all()?.to_scalar::<f64>()?;
        assert!(norm > 0., "{name}");
        let (value, step) = (var.as_tensor().copy()?, 1e-4 / norm.sqrt());
        let at = |factor: f64| -> Result<f64, Box<dyn std::error::Error>> {
            var.set(&(&value + (&direction * (factor * step))?)?)?;
            Ok(loss()?.to_scalar::<f64>()?)
        };
        let slope = Tensor::new((at(1.)? - at(-1.)?) / (2. * step), &Device::Cpu)?;
        var.set(&value)?;
        assert_close(name, &slope, &Tensor::new(norm, &Device::Cpu)?, 1e-4);
    }
    Ok(())
}

/// What a file leaves out of its experts is what transformers assumes, and null is none.
#[test]
fn experts_have_the_defaults_of_transformers() {
    let left_out = |family: &str| {
        let (_, mut config) = of_golden(family);
        config["n_routed_experts"] = json!(32);
        let entries = config.as_object_mut().expect("an object");
        for key in [
            "n_group",
            "topk_group",
            "routed_scaling_factor",
            "n_shared_experts",
            "first_k_dense_replace",
        ] {
            entries.remove(key);
        }
        config
    };
    let parsed = |config: &Value| {
        let config = LlamaConfig::parse("config.json", config).expect("a configuration");
        (config.num_layers, config.moe.expect("experts"))
    };
    let (layers, v3) = parsed(&left_out("deepseek_v3"));
    let groups = v3.routing.groups.expect("groups");
    assert_eq!((groups.count, groups.chosen, groups.best), (8, 4, 2));
    assert_eq!(v3.routing.scaling, 2.5);
    assert_eq!(v3.shared_size, Some(v3.intermediate_size));
    let dense: Vec<usize> = (0..layers.min(3)).collect();
    assert_eq!(v3.dense_layers, dense);
    for (family, shared) in [("deepseek_v2", 2), ("mistral4", 1)] {
        let (_, moe) = parsed(&left_out(family));
        assert_eq!((moe.routing.groups, moe.routing.scaling), (None, 1.));
        assert_eq!(moe.shared_size, Some(shared * moe.intermediate_size));
        assert!(moe.dense_layers.is_empty(), "{family}");
    }
    let mut none = left_out("deepseek_v3");
    none["n_shared_experts"] = Value::Null;
    none["n_group"] = Value::Null;
    let (_, moe) = parsed(&none);
    assert_eq!((moe.shared_size, moe.routing.groups), (None, None));
}

#[test]
fn unsupported_entries_are_refused_by_name() {
    let (_, v2) = of_golden("deepseek_v2_groups");
    let (_, v3) = of_golden("deepseek_v3");
    for (config, key, value) in [
        (&v2, "topk_method", json!("noaux_tc")),
        (&v2, "norm_topk_prob", json!(true)),
        (&v2, "n_group", json!(3)),
        (&v3, "topk_group", json!(5)),
        (&v3, "scoring_func", json!("softmax")),
        (&v3, "moe_layer_freq", json!(2)),
        (&v3, "kv_lora_rank", Value::Null),
        (&v3, "qk_rope_head_dim", json!(7)),
        (&v3, "n_routed_experts", json!(0)),
    ] {
        let mut config = config.clone();
        config[key] = value;
        let error = LlamaConfig::parse("config.json", &config).expect_err(key);
        let text = error.to_string();
        let named = text.contains(key)
            || key == "qk_rope_head_dim" && text.contains("partial_rotary_factor");
        assert!(named, "{key}: {text}");
    }
    let mut config = v3.clone();
    config["model_type"] = json!("deepseek_v4");
    let error = LlamaConfig::parse("config.json", &config)
        .expect_err("V4")
        .to_string();
    assert!(
        error.contains("deepseek_v4") && error.contains("deepseek_v3"),
        "{error}"
    );
}

/// llama.cpp's names for this kind of attention are not written.
#[test]
fn no_file_for_llama_cpp_is_written() {
    for family in ["deepseek_v2", "deepseek_v3", "mistral4"] {
        let (tensors, config) = of_golden(family);
        let dir = tempfile::tempdir().expect("a folder");
        opened(dir.path(), &tensors, ("config.json", &config)).expect("a model");
        let source = fp8::load::Checkpoint::open_dir(dir.path()).expect("a checkpoint");
        let options = models::gguf::GgufOptions::new(models::gguf::GgufType::F16);
        let file = dir.path().join("m.gguf");
        let quiet = &mut fp8::rewrite::quiet;
        match models::gguf::write_gguf(&source, &file, &options, quiet) {
            Err(models::Error::Config { key, value, .. }) => {
                assert_eq!((key.as_str(), value.as_str()), ("model_type", family));
            }
            other => panic!("{family}: {other:?}"),
        }
        assert!(!file.exists());
    }
}
