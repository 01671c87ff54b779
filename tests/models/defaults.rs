//! What a `config.json` leaves out means what it means to transformers, and what a caller leaves out is what the documentation says.

use fp8::models::{GenerationOptions, LlamaConfig};
use fp8_files::search::SearchOptions;
use serde_json::{Value, json};

/// A configuration of `kind` with these entries beside the sizes that every model has to state.
fn parse(kind: &str, entries: &Value) -> LlamaConfig {
    let mut config = json!({
        "model_type": kind, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "moe_intermediate_size": 16,
    });
    for (key, value) in entries.as_object().expect("an object") {
        config[key] = value.clone();
    }
    LlamaConfig::parse("config.json", &config).expect("a configuration")
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

#[test]
fn options_have_the_documented_defaults() {
    let options = GenerationOptions::default();
    assert_eq!(options.max_new_tokens, 128);
    // Greedy, with all tokens.
    let draws = (options.temperature, options.top_k, options.top_p);
    assert_eq!(draws, (0., None, None));
    let options = SearchOptions::default();
    assert_eq!((options.damping, options.caution), (0.3, 10.));
    assert!(options.outliers && options.retuning);
}
