//! Adapters that do not fit, or are of a kind that is not supported: errors with the value, and an unchanged model.

use crate::support::*;
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::FilesError;
use fp8::fp8_files::adapter::AdapterFile;
use fp8::load::Checkpoint;
use fp8::models::{AdapterConfig, AdapterError, Error, Model, Targets};
use fp8::rewrite::Merged;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// A copy of an adapter, with some entries of its configuration changed.
fn changed(name: &str, entries: Value, to: &Path) {
    let from = adapter_dir(name);
    let tensors = "adapter_model.safetensors";
    fs::copy(from.join(tensors), to.join(tensors)).expect("copied");
    let text = fs::read_to_string(from.join("adapter_config.json")).expect("a configuration");
    let mut config: Value = serde_json::from_str(&text).expect("JSON");
    for (key, value) in entries.as_object().expect("entries") {
        config[key] = value.clone();
    }
    fs::write(to.join("adapter_config.json"), config.to_string()).expect("written");
}

/// What both ways of using an adapter say, which is the same.
fn refusals(base: &Base, dir: &Path) -> [String; 2] {
    let mut model = base.open();
    let loaded = model.load_adapter("bad", dir).expect_err("refused");
    assert!(model.adapters().is_empty() && model.active_adapter().is_none());
    assert_eq!(
        values(&model.forward(base.ids()).unwrap()),
        values(&base.open().forward(base.ids()).unwrap())
    );
    let checkpoint = Checkpoint::open_dir(base.dir.path()).expect("a base");
    let merged =
        AdapterFile::open(dir).and_then(|file| Merged::new(&checkpoint, &file).map(|_| ()));
    [loaded.to_string(), merged.expect_err("refused").to_string()]
}

#[test]
fn other_kinds_are_refused_by_name() {
    let base = Base::new("llama");
    for (entries, parts) in [
        (
            json!({ "peft_type": "IA3" }),
            ["`peft_type` is \"IA3\"", "\"LORA\""],
        ),
        (
            json!({ "use_dora": true }),
            ["`use_dora` is true", "null or false"],
        ),
        (json!({ "bias": "all" }), ["`bias` is \"all\"", "\"none\""]),
        (
            json!({ "modules_to_save": "lm_head" }),
            ["`modules_to_save` is \"lm_head\"", "a list of texts"],
        ),
        (
            json!({ "target_parameters": ["experts.w1"] }),
            ["`target_parameters`", "null"],
        ),
        (
            json!({ "fan_in_fan_out": true }),
            ["`fan_in_fan_out` is true", "false"],
        ),
        (
            json!({ "init_lora_weights": "pissa" }),
            ["`init_lora_weights` is \"pissa\"", "\"gaussian\""],
        ),
        (
            json!({ "lora_bias": true }),
            ["`lora_bias` is true", "false"],
        ),
        (
            json!({ "use_newer_kind": true }),
            ["`use_newer_kind` is true", "no such entry"],
        ),
        (json!({ "r": 0 }), ["`r` is 0", "a positive count"]),
        (
            json!({ "lora_alpha": "much" }),
            ["`lora_alpha` is \"much\"", "a number"],
        ),
        (
            json!({ "lora_dropout": 1.5 }),
            ["`lora_dropout` is 1.5", "a probability"],
        ),
        (
            json!({ "target_modules": null }),
            ["`target_modules` is null", "names"],
        ),
        (
            json!({ "target_modules": [1] }),
            ["`target_modules` is [1]", "texts"],
        ),
        (json!({ "target_modules": "(" }), ["`(`", "not valid"]),
        (
            json!({ "rank_pattern": { "q_proj": -1 } }),
            ["`rank_pattern.q_proj` is -1", "a positive count"],
        ),
        (
            json!({ "layers_to_transform": "1" }),
            ["`layers_to_transform` is \"1\"", "a list of them"],
        ),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        changed("llama.names", entries.clone(), dir.path());
        for refusal in refusals(&base, dir.path()) {
            for part in parts {
                assert!(refusal.contains(part), "{entries}: {part}: {refusal}");
            }
        }
    }
}

#[test]
fn tensors_have_to_fit_the_targets() {
    let base = Base::new("llama");
    for (entries, parts) in [
        // More layers than the file has.
        (
            json!({ "target_modules": ["q_proj", "v_proj", "down_proj", "k_proj"] }),
            [
                "4 tensors of layers that the targets name are missing",
                "layers.0.self_attn.k_proj.lora_A.weight",
            ],
        ),
        // Fewer.
        (
            json!({ "target_modules": ["q_proj", "v_proj"] }),
            [
                "4 tensors belong to no targeted linear layer",
                "layers.0.mlp.down_proj.lora_A.weight",
            ],
        ),
        (
            json!({ "r": 3 }),
            ["has shape [4, 32]", "[3, 32] for rank 3"],
        ),
        (
            json!({ "rank_pattern": {} }),
            ["has shape [2, 48]", "[4, 48] for rank 4"],
        ),
    ] {
        let dir = tempfile::tempdir().expect("a folder");
        changed("llama.names", entries.clone(), dir.path());
        for refusal in refusals(&base, dir.path()) {
            for part in parts {
                assert!(refusal.contains(part), "{entries}: {part}: {refusal}");
            }
        }
    }
}

#[test]
fn files_have_to_be_whole() -> Outcome {
    let base = Base::new("llama");
    let dir = tempfile::tempdir()?;
    let read = || {
        let path = adapter_dir("llama.names").join("adapter_model.safetensors");
        candle_core::safetensors::load(path, &Device::Cpu)
    };
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight";
    let check = |tensors: &HashMap<String, Tensor>, parts: [&str; 2]| {
        changed("llama.names", json!({}), dir.path());
        let path = dir.path().join("adapter_model.safetensors");
        candle_core::safetensors::save(tensors, path).expect("written");
        for refusal in refusals(&base, dir.path()) {
            for part in parts {
                assert!(refusal.contains(part), "{part}: {refusal}");
            }
        }
    };
    let mut tensors = read()?;
    let removed = tensors.remove(name).ok_or("a matrix")?;
    check(
        &tensors,
        [
            "1 tensors of layers that the targets name are missing",
            name,
        ],
    );
    let mut tensors = read()?;
    tensors.insert("base_model.model.lm_head.weight".into(), removed);
    check(
        &tensors,
        [
            "1 tensors belong to no targeted",
            "base_model.model.lm_head.weight",
        ],
    );
    let mut tensors = read()?;
    let integers = Tensor::zeros((32, 4), DType::U32, &Device::Cpu)?;
    tensors.insert(name.into(), integers);
    check(&tensors, [name, "expected F32, BF16 or F16"]);
    // Not safetensors, not JSON, not there.
    changed("llama.names", json!({}), dir.path());
    fs::write(dir.path().join("adapter_model.safetensors"), "nothing")?;
    for refusal in refusals(&base, dir.path()) {
        assert!(
            refusal.contains("not a valid safetensors file"),
            "{refusal}"
        );
    }
    fs::write(dir.path().join("adapter_config.json"), "{")?;
    for refusal in refusals(&base, dir.path()) {
        assert!(
            refusal.contains("the configuration of the adapter is not valid"),
            "{refusal}"
        );
    }
    for refusal in refusals(&base, &dir.path().join("nothing")) {
        assert!(refusal.contains("adapter_config.json"), "{refusal}");
    }
    Ok(())
}

/// Layers that an adapter replaces: the model must have them, in these sizes; only a classifier may be new.
#[test]
fn names_of_classes_are_a_list_of_texts() -> Outcome {
    let base = Base::new("llama");
    let dir = tempfile::tempdir()?;
    changed("llama.names", json!({}), dir.path());
    let path = dir.path().join("adapter_model.safetensors");
    let tensors = candle_core::safetensors::load(&path, &Device::Cpu)?;
    for labels in ["cold, warm", "{\"0\": \"cold\"}", "[0, 1]"] {
        let metadata = HashMap::from([("labels".to_string(), labels.to_string())]);
        safetensors::serialize_to_file(&tensors, Some(metadata), &path)?;
        for refusal in refusals(&base, dir.path()) {
            assert!(refusal.contains("adapter_model.safetensors"), "{refusal}");
            assert!(refusal.contains("`labels`"), "{refusal}");
        }
    }
    Ok(())
}

#[test]
fn replaced_layers_have_to_fit() -> Outcome {
    let cases: [(&str, &str, &str, &[usize], &str); 5] = [
        (
            "llama",
            "llama.names",
            "classifier.weight",
            &[3, 64],
            "classifier",
        ),
        (
            "llama",
            "llama.names",
            "model.layers.0.self_attn.o_proj.weight",
            &[8, 8],
            "[8, 8]",
        ),
        (
            "llama",
            "llama.names",
            "model.layers.0.self_attn.o_proj.bias",
            &[8],
            "o_proj.bias",
        ),
        (
            "llama",
            "llama.names",
            "model.layers.0.self_attn.o_proj.weight",
            &[8],
            "o_proj.weight",
        ),
        ("bert", "bert.all", "score.weight", &[3, 64], "score"),
    ];
    for (family, name, tensor, shape, part) in cases {
        let base = Base::new(family);
        let dir = tempfile::tempdir()?;
        let saved = json!({ "modules_to_save": ["classifier", "score", "o_proj"] });
        changed(name, saved, dir.path());
        let path = dir.path().join("adapter_model.safetensors");
        let mut tensors = candle_core::safetensors::load(&path, &Device::Cpu)?;
        let own = Tensor::zeros(shape, DType::F32, &Device::Cpu)?;
        tensors.insert(format!("base_model.model.{tensor}"), own);
        candle_core::safetensors::save(&tensors, &path)?;
        for refusal in refusals(&base, dir.path()) {
            assert!(refusal.contains(part), "{tensor}: {refusal}");
        }
    }
    Ok(())
}

/// PEFT takes the first in the file.
#[test]
fn patterns_that_disagree_about_a_layer_are_refused() {
    let patterns = |values: [f64; 2]| {
        let names = ["q_proj", "layers.0.self_attn.q_proj"].map(String::from);
        AdapterConfig::new(2).with_alpha_pattern(names.into_iter().zip(values).collect())
    };
    let path = "model.layers.0.self_attn.q_proj";
    let error = patterns([16., 64.]).alpha_of(path).unwrap_err().to_string();
    for part in [path, "`q_proj`", "`layers.0.self_attn.q_proj`", "64 and 16"] {
        assert!(error.contains(part), "{error}");
    }
    let other = "model.layers.1.self_attn.q_proj";
    assert_eq!(patterns([16., 64.]).alpha_of(other).unwrap(), 16.);
    assert_eq!(patterns([8., 8.]).alpha_of(path).unwrap(), 8.);
}

#[test]
fn new_adapters_are_checked() {
    let base = Base::new("llama");
    let mut model = base.open();
    let add = |model: &mut Model, name: &str, config: AdapterConfig| {
        let vars = VarMap::new();
        let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
        model.add_adapter(name, &config, vb)
    };
    let config = AdapterConfig::new(2).with_targets(Targets::names(["q_proj", "qproj"]));
    match add(&mut model, "new", config) {
        Err(Error::Fp8(fp8::Error::Files(FilesError::Adapter(AdapterError::NoTarget {
            target,
            layers,
        })))) => {
            assert_eq!(target, "qproj");
            assert_eq!(
                layers,
                "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
            );
        }
        other => panic!("{other:?}"),
    }
    for (config, part) in [
        (AdapterConfig::new(0), "rank"),
        (AdapterConfig::new(1).with_alpha(f64::NAN), "alpha"),
        (AdapterConfig::new(1).with_dropout(1.), "dropout"),
        (
            AdapterConfig::new(1).with_targets(Targets::Expression("nothing.*".into())),
            "nothing.*",
        ),
        // The head is the embedding.
        (
            AdapterConfig::new(1).with_targets(Targets::names(["lm_head"])),
            "lm_head",
        ),
    ] {
        let refusal = add(&mut model, "new", config)
            .expect_err("refused")
            .to_string();
        assert!(refusal.contains(part), "{part}: {refusal}");
    }
    assert!(model.adapters().is_empty());
    add(&mut model, "new", AdapterConfig::new(1)).expect("an adapter");
    let twice = add(&mut model, "new", AdapterConfig::new(1)).expect_err("refused");
    assert!(
        matches!(&twice, Error::AdapterExists { name } if name == "new"),
        "{twice}"
    );
    let unknown = [
        model.set_adapter(Some("old")).expect_err("refused"),
        model.remove_adapter("old").expect_err("refused"),
        model.merge_adapter("old").expect_err("refused"),
        model.save_adapter("old", "nowhere").expect_err("refused"),
    ];
    for refusal in unknown {
        assert_eq!(
            refusal.to_string(),
            "there is no adapter `old`; there are: new"
        );
    }
    assert_eq!(model.active_adapter(), Some("new"));
}
