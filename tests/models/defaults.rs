//! What a `config.json` leaves out means what it means to transformers.

use fp8::models::LlamaConfig;
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
