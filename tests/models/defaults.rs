//! What a `config.json` leaves out means what it means to transformers, and what a caller leaves out is what the documentation says.

use fp8::models::gguf::{GgufOptions, GgufType};
use fp8::models::{AdapterConfig, GenerationOptions, LlamaConfig, RopeScaling, Targets};
use fp8::nn::LoraConfig;
use fp8_files::search::SearchOptions;
use serde_json::{Value, json};

/// The `config.json` of a model of `kind` with these entries beside the sizes that every model has to state.
fn file(kind: &str, entries: &Value) -> Value {
    let mut config = json!({
        "model_type": kind, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16,
    });
    for (key, value) in entries.as_object().expect("an object") {
        config[key] = value.clone();
    }
    config
}

/// The configuration in that file.
fn parse(kind: &str, entries: &Value) -> LlamaConfig {
    LlamaConfig::parse("config.json", &file(kind, entries)).expect("a configuration")
}

#[test]
fn epsilon_and_the_base_of_rotary_positions_depend_on_the_family() {
    for (kind, eps, theta) in [
        ("llama", 1e-6, 1e4),
        ("mistral", 1e-6, 1e4),
        ("qwen2", 1e-6, 1e4),
        ("qwen3_moe", 1e-6, 1e4),
        ("phi3", 1e-5, 1e4),
        ("mixtral", 1e-5, 1e6),
    ] {
        let config = parse(kind, &json!({}));
        assert_eq!(
            (config.rms_norm_eps, config.rope.theta),
            (eps, theta),
            "{kind}"
        );
        let said = parse(kind, &json!({ "rms_norm_eps": 1e-3, "rope_theta": 5e5 }));
        assert_eq!((said.rms_norm_eps, said.rope.theta), (1e-3, 5e5), "{kind}");
    }
}

#[test]
fn the_first_layers_of_qwen2_and_qwen3_alone_see_past_the_window() {
    let entries =
        json!({ "use_sliding_window": true, "sliding_window": 8, "max_window_layers": 2 });
    for (kind, first) in [("qwen2", 2), ("qwen3", 2), ("qwen3_moe", 0), ("mistral", 0)] {
        let windows = parse(kind, &entries).sliding_windows;
        let expected: Vec<_> = (0..3).map(|layer| (layer >= first).then_some(8)).collect();
        assert_eq!(windows, expected, "{kind}");
    }
}

/// transformers ignores the entry in a Llama, and in a Qwen that does not ask for it.
#[test]
fn a_window_belongs_to_families_that_have_one() {
    for (kind, window) in [
        ("llama", None),
        ("mistral", Some(8)),
        ("mixtral", Some(8)),
        ("phi3", Some(8)),
        ("qwen2", None),
        ("qwen3", None),
        ("qwen3_moe", None),
    ] {
        let given = parse(kind, &json!({ "sliding_window": 8 }));
        assert_eq!(given.sliding_windows, [window; 3], "{kind}");
        let null = parse(kind, &json!({ "sliding_window": null }));
        assert_eq!(null.sliding_windows, [None; 3], "{kind}");
    }
    // Not even with the other entries that speak of windows.
    let entries = json!({
        "sliding_window": 8, "use_sliding_window": true, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention"],
    });
    assert_eq!(parse("llama", &entries).sliding_windows, [None; 3]);
}

/// transformers opens a Mistral with the entry as a Ministral, unless it is the language part of a larger model.
#[test]
fn kinds_of_layers_count_in_families_that_read_them() {
    let entries = json!({
        "use_sliding_window": true, "sliding_window": 8, "max_window_layers": 0,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    });
    let (read, all) = ([None, Some(8), None], [Some(8); 3]);
    for (kind, expected) in [
        ("mistral", read),
        ("qwen2", read),
        ("qwen3", read),
        ("mixtral", all),
        ("phi3", all),
        ("qwen3_moe", all),
        ("llama", [None; 3]),
    ] {
        let windows = parse(kind, &entries).sliding_windows;
        assert_eq!(windows, expected, "{kind}");
        let part = json!({ "model_type": "of_images", "text_config": file(kind, &entries) });
        let part = LlamaConfig::parse("config.json", &part).expect("a configuration");
        let expected = if kind == "mistral" { all } else { expected };
        assert_eq!(part.sliding_windows, expected, "{kind} as a part");
    }
}

/// transformers raises when such a model runs.
#[test]
fn layers_with_a_window_need_one() {
    let error = |kind: &str, entries: &Value| {
        let error = LlamaConfig::parse("config.json", &file(kind, entries)).expect_err(kind);
        error.to_string()
    };
    let types = json!(["full_attention", "full_attention", "sliding_attention"]);
    for kind in ["mistral", "qwen2", "qwen3"] {
        let mut entries = json!({
            "use_sliding_window": true, "sliding_window": null, "max_window_layers": 0, "layer_types": types,
        });
        let message = error(kind, &entries);
        assert!(message.contains("sliding_window"), "{message}");
        assert!(
            message.contains("layer_types has sliding_attention"),
            "{message}"
        );
        if kind != "mistral" {
            entries["sliding_window"] = json!(8);
            entries["use_sliding_window"] = json!(false);
            let message = error(kind, &entries);
            assert!(message.contains("use_sliding_window"), "{message}");
        }
        entries["layer_types"] = json!(["full_attention", "full_attention", "full_attention"]);
        assert_eq!(parse(kind, &entries).sliding_windows, [None; 3], "{kind}");
    }
}

/// An entry that is null says that there is none.
#[test]
fn a_window_that_a_file_leaves_out_has_4096_tokens_in_some_families() {
    let entries = json!({ "use_sliding_window": true, "max_window_layers": 0 });
    for (kind, window) in [
        ("mistral", Some(4096)),
        ("qwen2", Some(4096)),
        ("qwen3", Some(4096)),
        ("qwen3_moe", Some(4096)),
        ("mixtral", None),
        ("phi3", None),
        ("llama", None),
    ] {
        let left_out = parse(kind, &entries).sliding_windows;
        assert_eq!(left_out, [window; 3], "{kind}");
        let mut null = entries.clone();
        null["sliding_window"] = Value::Null;
        assert_eq!(parse(kind, &null).sliding_windows, [None; 3], "{kind}");
    }
    assert_eq!(parse("qwen3", &json!({})).sliding_windows, [None; 3]);
}

#[test]
fn the_positions_of_a_model_depend_on_the_family() {
    for (kind, positions) in [
        ("llama", 2048),
        ("mistral", 131_072),
        ("mixtral", 131_072),
        ("qwen2", 32_768),
        ("qwen3", 32_768),
        ("qwen3_moe", 32_768),
        ("phi3", 4096),
    ] {
        let yarn = json!({ "rope_scaling": { "rope_type": "yarn", "factor": 2.0 } });
        let config = parse(kind, &yarn);
        assert_eq!(config.max_position_embeddings, positions, "{kind}");
        let from = match config.rope.scaling {
            RopeScaling::Yarn { original, .. } => original,
            other => panic!("{kind}: {other:?}"),
        };
        assert_eq!(from, positions, "{kind}");
    }
}

/// transformers ignores the entry in a Qwen2.
#[test]
fn qwen2_has_biases_of_queries_keys_and_values_whatever_its_file_says() {
    for (kind, entry, expected) in [
        ("qwen2", json!({}), (true, false)),
        ("qwen2", json!({ "attention_bias": false }), (true, false)),
        ("qwen2", json!({ "attention_bias": true }), (true, false)),
        ("llama", json!({}), (false, false)),
        ("llama", json!({ "attention_bias": true }), (true, true)),
        ("qwen3", json!({ "attention_bias": false }), (false, false)),
    ] {
        let config = parse(kind, &entry);
        let biases = (config.qkv_bias, config.output_bias);
        assert_eq!(biases, expected, "{kind}, {entry}");
    }
}

/// Python writes numbers that JSON does not have: none of them counts as an entry that is left out.
#[test]
fn numbers_that_are_not_finite_have_no_default() {
    let whole = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2,
    });
    LlamaConfig::parse("config.json", &whole).expect("a configuration");
    for entry in ["rms_norm_eps", "rope_theta", "num_key_value_heads"] {
        for token in ["NaN", "Infinity", "-Infinity"] {
            let mut config = whole.clone();
            config[entry] = fp8_files::python_json::parse(token).expect("a token");
            let error = LlamaConfig::parse("config.json", &config).expect_err(entry);
            let is_named = matches!(
                &error,
                fp8::models::Error::Config { key, value, .. } if key == entry && value == token
            );
            assert!(is_named, "{error}");
        }
    }
}

#[test]
fn options_have_the_documented_defaults() {
    let options = GenerationOptions::default();
    assert_eq!(options.max_new_tokens, 128);
    // Greedy, with all tokens.
    let draws = (options.temperature, options.top_k, options.top_p);
    assert_eq!(draws, (0., None, None));
    assert_eq!(options.repetition_penalty, 1.);
    assert_eq!((options.repetition_window, options.seed), (None, 0));
    // The model's own end tokens, and as large a cache as the tokens need.
    assert!(options.stop_tokens.is_empty() && options.stop_strings.is_empty());
    assert!(!options.ignore_eos);
    assert_eq!(options.cache_capacity, None);
    let options = SearchOptions::default();
    assert_eq!((options.damping, options.caution), (0.3, 10.));
    assert!(options.outliers && options.retuning);
}

#[test]
fn updates_of_adapters_are_multiplied_by_1_and_drop_nothing() {
    let config = AdapterConfig::new(8);
    assert_eq!((config.rank, config.alpha, config.dropout), (8, 8., 0.));
    assert_eq!(config.targets, Targets::AllLinear);
    assert!(!config.rslora && config.saved.is_empty() && config.exclude.is_none());
    let config = LoraConfig::new(8);
    assert_eq!((config.rank, config.alpha, config.dropout), (8, 8., 0.));
    assert!(!config.rslora);
    assert_eq!(config.factor(), 1.);
}

#[test]
fn gguf_files_are_q8_0_and_replace_nothing() {
    let options = GgufOptions::default();
    assert_eq!(options.tensor_type, GgufType::Q8_0);
    assert!(!options.overwrite);
    assert_eq!((options.name, options.pre_tokenizer), (None, None));
    for name in ["f32", "f16", "bf16", "q8_0", "Q8_0", "BF16"] {
        let parsed: GgufType = name.parse().expect("a type");
        assert_eq!(parsed.to_string(), name.to_lowercase());
    }
    let error = "q4_0".parse::<GgufType>().expect_err("no type");
    assert_eq!(error, "`q4_0` is not f32, f16, bf16 or q8_0");
}
