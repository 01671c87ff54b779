//! Entries of a `config.json` that change what a model computes are followed as transformers follows them, or refused by name.

use fp8::models::{BertConfig, Error, LlamaConfig, Result, RopeScaling};
use serde_json::{Value, json};

/// A configuration of `kind` with heads of 16 features and these entries.
fn parse(kind: &str, entries: &Value) -> Result<LlamaConfig> {
    let mut config = json!({
        "model_type": kind, "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    });
    for (key, value) in entries.as_object().expect("an object") {
        config[key] = value.clone();
    }
    LlamaConfig::parse("config.json", &config)
}

/// The entry that the error names.
fn refused<T: std::fmt::Debug>(parsed: Result<T>) -> String {
    match parsed {
        Err(Error::Config { key, .. }) => key,
        other => panic!("an entry is to be refused: {other:?}"),
    }
}

/// transformers 5 follows `rope_scaling` where a file has both, other programs `rope_parameters`.
#[test]
fn positions_under_two_names_are_the_same() -> Result<()> {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1e6 });
    let new = parse("qwen3", &json!({ "rope_parameters": yarn }))?.rope;
    assert!(matches!(
        new.scaling,
        RopeScaling::Yarn { original: 64, .. }
    ));
    assert_eq!(new.theta, 1e6);
    let old = json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64 });
    for entries in [
        json!({ "rope_parameters": yarn, "rope_scaling": old, "rope_theta": 1e6 }),
        json!({ "rope_parameters": yarn, "rope_scaling": {} }),
        json!({ "rope_scaling": old, "rope_theta": 1e6 }),
    ] {
        assert_eq!(parse("qwen3", &entries)?.rope, new, "{entries}");
    }
    let plain = json!({ "rope_type": "default", "rope_theta": 1e6 });
    for entries in [
        json!({ "rope_parameters": plain, "rope_scaling": old, "rope_theta": 1e6 }),
        // The base of positions would be the usual one.
        json!({ "rope_parameters": yarn, "rope_scaling": old }),
    ] {
        assert_eq!(
            refused(parse("qwen3", &entries)),
            "rope_scaling",
            "{entries}"
        );
    }
    Ok(())
}

/// Two entries of latent attention are in these objects, too.
#[test]
fn scores_under_two_names_are_the_same() -> Result<()> {
    let yarn = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.0,
        "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1 });
    let latent = || {
        json!({
            "q_lora_rank": null, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 16,
            "num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "partial_rotary_factor": 0.5,
        })
    };
    let both = |key: &str, value: Value| {
        let mut entries = latent();
        entries["rope_parameters"] = yarn.clone();
        entries["rope_scaling"] = yarn.clone();
        entries["rope_scaling"][key] = value;
        parse("mistral4", &entries)
    };
    both("factor", json!(4))?;
    // Without them transformers would take YaRN with a factor of 128.
    assert_eq!(refused(parse("mistral4", &latent())), "rope_parameters");
    for key in ["mscale_all_dim", "llama_4_scaling_beta"] {
        assert_eq!(refused(both(key, json!(0.5))), "rope_scaling", "{key}");
        assert_eq!(refused(both(key, Value::Null)), "rope_scaling", "{key}");
    }
    Ok(())
}

#[test]
fn positions_that_layers_do_not_share_are_refused() {
    let of_layers = json!({ "full_attention": { "rope_theta": 1e6 }, "sliding_attention": { "rope_theta": 1e4 } });
    let entries = json!({ "rope_parameters": of_layers });
    let key = "rope_parameters.full_attention";
    assert_eq!(refused(parse("qwen3", &entries)), key);
    let text = json!({ "rope_scaling": "yarn" });
    assert_eq!(refused(parse("llama", &text)), "rope_scaling");
}

/// transformers rotates a part of a head's features in a Phi-3, and all of them in the others whatever the entry says.
#[test]
fn a_part_of_a_head_rotates_in_phi3_alone() -> Result<()> {
    let part = json!({ "partial_rotary_factor": 0.5 });
    assert_eq!(parse("phi3", &part)?.rope.dim, 8);
    for kind in ["llama", "mistral", "qwen2", "qwen3"] {
        assert_eq!(refused(parse(kind, &part)), "partial_rotary_factor");
        let inside = json!({ "rope_parameters": part });
        let key = "rope_parameters.partial_rotary_factor";
        assert_eq!(refused(parse(kind, &inside)), key, "{kind}");
        let all = json!({ "partial_rotary_factor": 1.0 });
        assert_eq!(parse(kind, &all)?.rope.dim, 16, "{kind}");
    }
    Ok(())
}

/// The first files of Phi-3 have other names for `longrope`, and one without the original length was trained for 4096 tokens.
#[test]
fn long_positions_of_phi3_have_three_names() -> Result<()> {
    for name in ["longrope", "su", "yarn"] {
        let factors = vec![1.5; 8];
        let scaling = json!({ "type": name, "factor": 32.0, "short_factor": factors, "long_factor": factors });
        let entries = json!({ "rope_scaling": scaling, "max_position_embeddings": 131_072 });
        let found = parse("phi3", &entries)?.rope.scaling;
        let is_long = matches!(&found, RopeScaling::LongRope { original: 4096, .. });
        assert!(is_long, "{name}: {found:?}");
    }
    Ok(())
}

/// The original length of scaled positions.
fn original(kind: &str, entries: &Value) -> Result<usize> {
    match parse(kind, entries)?.rope.scaling {
        RopeScaling::Llama3 { original, .. }
        | RopeScaling::Yarn { original, .. }
        | RopeScaling::LongRope { original, .. } => Ok(original),
        other => panic!("{entries}: {other:?}"),
    }
}

/// transformers 5 takes the length beside the object of rotary positions, other programs that inside of it.
#[test]
fn original_lengths_in_two_places_are_the_same() -> Result<()> {
    const KEY: &str = "original_max_position_embeddings";
    let factors = vec![1.5; 8];
    for (kind, scaling) in [
        (
            "llama",
            json!({ "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0 }),
        ),
        ("qwen3", json!({ "rope_type": "yarn", "factor": 4.0 })),
        (
            "phi3",
            json!({ "type": "longrope", "short_factor": factors, "long_factor": factors }),
        ),
    ] {
        for object in ["rope_scaling", "rope_parameters"] {
            let with = |beside: Option<usize>, inside: Option<usize>| {
                let mut entries = json!({ object: scaling, "max_position_embeddings": 128 });
                if let Some(beside) = beside {
                    entries[KEY] = json!(beside);
                }
                if let Some(inside) = inside {
                    entries[object][KEY] = json!(inside);
                }
                entries
            };
            assert_eq!(original(kind, &with(Some(64), None))?, 64, "{kind}");
            assert_eq!(original(kind, &with(Some(64), Some(64)))?, 64, "{kind}");
            let name = format!("{object}.{KEY}");
            let refusal = |entries: &Value| match original(kind, entries) {
                Err(Error::Config {
                    key,
                    value,
                    expected,
                    ..
                }) => (key, value, expected),
                other => panic!("{kind}: {other:?}"),
            };
            let expected = format!("64, as {KEY} says");
            let found = refusal(&with(Some(64), Some(32)));
            assert_eq!(found, (name.clone(), "32".to_string(), expected), "{kind}");
            // The usual length of a Phi-3 counts like one that its file states.
            let (inside, none) = (with(None, Some(32)), with(None, None));
            if kind == "phi3" {
                let (key, value, expected) = refusal(&inside);
                assert_eq!((key, value), (name, "32".to_string()));
                assert!(expected.starts_with(&format!("4096, which {KEY} is")));
                assert_eq!(original(kind, &none)?, 4096);
            } else {
                assert_eq!(original(kind, &inside)?, 32, "{kind}");
                assert_eq!(original(kind, &none)?, 128, "{kind}");
            }
        }
    }
    Ok(())
}

/// Its tokens see none after them.
#[test]
fn a_bert_that_decodes_is_refused() -> Result<()> {
    let mut config = json!({
        "model_type": "bert", "vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "is_decoder": false,
    });
    BertConfig::parse("config.json", &config)?;
    config["is_decoder"] = json!(true);
    let parsed = BertConfig::parse("config.json", &config);
    assert_eq!(refused(parsed), "is_decoder");
    Ok(())
}

/// With several labels for a text, each has a probability of its own.
#[test]
fn classifiers_with_several_labels_are_refused() -> Result<()> {
    let config = |problem: Value, class: &str| {
        let config = json!({
            "model_type": "bert", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 2, "architectures": [class], "problem_type": problem,
        });
        BertConfig::parse("config.json", &config)
    };
    let class = "BertForSequenceClassification";
    for problem in ["multi_label_classification", "regression"] {
        assert_eq!(refused(config(problem.into(), class)), "problem_type");
        config(problem.into(), "BertModel")?;
    }
    for problem in [Value::Null, "single_label_classification".into()] {
        assert_eq!(config(problem, class)?.labels.len(), 2);
    }
    Ok(())
}
