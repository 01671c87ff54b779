//! `fp8 train` of encoders, and what is made of the result.

use crate::support::{Dir, failure, fp8, json_output, output};
use candle_core::{Device, Tensor};
use fp8_test_support::encoder;
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

fn folder() -> (Dir, String) {
    let dir = Dir::new();
    let model = dir.join("model");
    std::fs::create_dir(&model).unwrap();
    encoder::write(Path::new(&model));
    (dir, model)
}

fn path(file: std::path::PathBuf) -> String {
    file.to_str().unwrap().to_string()
}

fn json(path: &str) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The arguments of a short run.
fn train(model: &str, data: &str, out: &str, more: &[&str]) -> String {
    let own = [
        "train", model, "--data", data, "--out", out, "--steps", "24",
    ];
    let sizes = ["--batch", "6", "--context", "24"];
    let lr = match more.contains(&"--lr") {
        true => &[][..],
        false => &["--lr", "5e-3"],
    };
    output(&[&own[..], &sizes, lr, more].concat())
}

#[test]
fn a_classifier_is_trained_measured_and_written() {
    let (dir, model) = folder();
    let data = path(encoder::labelled(Path::new(&model)));
    let out = dir.join("run");
    let said = train(&model, &data, &out, &["--recipe", "rowwise"]);
    assert!(
        said.contains("2 classes") && said.contains("accuracy"),
        "{said}"
    );
    let summary = json(&format!("{out}/summary.json"));
    assert_eq!(summary["labels"], serde_json::json!(["cold", "warm"]));
    assert!(summary["accuracy"].as_f64().unwrap() > 0.5, "{summary}");
    assert!(summary["perplexity"].is_null());
    let trained = format!("{out}/model");
    let measured = json_output(&["eval", &trained, "--data", &data, "--json"]);
    assert_eq!(measured["rows"], 60);
    assert!(measured["accuracy"].as_f64().unwrap() > 0.8, "{measured}");
    let card = std::fs::read_to_string(format!("{trained}/README.md")).unwrap();
    assert!(
        card.contains("| Learned | the labels cold, warm |"),
        "{card}"
    );
    assert!(card.contains("| Validation accuracy |"), "{card}");

    // It embeds as its encoder does, and in FP8 it still classifies.
    output(&["embed", &trained, "red rose"]);
    let fp8 = dir.join("fp8");
    output(&["quantize", &trained, "--out", &fp8]);
    let rounded = json_output(&["eval", &fp8, "--data", &data, "--json"]);
    assert!(rounded["accuracy"].as_f64().unwrap() > 0.8, "{rounded}");

    // On: the same classes go on, other labels are no classes of this model.
    train(&trained, &data, &dir.join("more"), &["--recipe", "f32"]);
    let other = [
        serde_json::json!({ "text": "a", "label": "dry" }),
        serde_json::json!({ "text": "b", "label": "wet" }),
    ];
    let other = path(encoder::lines(Path::new(&model), "other.jsonl", other));
    let error = failure(&["eval", &trained, "--data", &other]);
    assert!(
        error.contains("the data has the classes dry, wet, the model has cold, warm"),
        "{error}"
    );
}

#[test]
fn an_adapter_with_a_classifier_is_used_and_merged() {
    let (dir, model) = folder();
    let data = path(encoder::labelled(Path::new(&model)));
    let fp8 = dir.join("fp8");
    output(&["quantize", &model, "--out", &fp8]);
    let out = dir.join("run");
    train(
        &fp8,
        &data,
        &out,
        &["--lora", "4", "--target", "all-linear", "--lr", "2e-2"],
    );
    let adapter = format!("{out}/adapter");
    let config = json(&format!("{adapter}/adapter_config.json"));
    assert_eq!(config["modules_to_save"], serde_json::json!(["classifier"]));
    assert_eq!(config["task_type"], "SEQ_CLS");
    let accuracy = |args: &[&str]| {
        let args = [&["eval"], args, &["--data", &data, "--json"]].concat();
        json_output(&args)["accuracy"].as_f64().unwrap()
    };
    assert!(accuracy(&[&fp8, "--adapter", &adapter]) > 0.8);
    let merged = dir.join("merged");
    let searched = [
        "merge",
        &fp8,
        &adapter,
        "--scheme",
        "channel-token",
        "--search",
        &data,
    ];
    let error = failure(&[&searched[..], &["--out", &merged]].concat());
    assert!(
        error.contains("merge first, then use `fp8 quantize`"),
        "{error}"
    );
    output(&[
        "merge",
        &fp8,
        &adapter,
        "--scheme",
        "channel-token",
        "--out",
        &merged,
    ]);
    assert!(accuracy(&[&merged]) > 0.8);
    let card = std::fs::read_to_string(format!("{merged}/README.md")).unwrap();
    assert!(
        card.contains("| Adapter | adapter |") && card.contains("| Scheme | channel-token"),
        "{card}"
    );
}

/// Also where the model has a classifier: an adapter brings its own.
#[test]
fn adapters_have_default_targets_and_a_new_classifier() {
    let (dir, model) = folder();
    let data = path(encoder::labelled(Path::new(&model)));
    let first = dir.join("first");
    let before = |said: String| -> f64 {
        let loss = said.split("before training: validation ").nth(1).unwrap();
        loss.split(' ').next().unwrap().parse().unwrap()
    };
    train(&model, &data, &first, &["--recipe", "f32"]);
    let (trained, out) = (format!("{first}/model"), dir.join("second"));
    let known = before(train(
        &trained,
        &data,
        &dir.join("on"),
        &["--recipe", "f32"],
    ));
    let new = before(train(&trained, &data, &out, &["--lora", "2"]));
    // Of two classes, of which a new classifier knows nothing, but the encoder much.
    assert!(new > 3. * known, "{known} {new}");
    let config = json(&format!("{out}/adapter/adapter_config.json"));
    let targets = serde_json::json!(["query", "value"]);
    assert_eq!(config["target_modules"], targets);
    assert_eq!(config["modules_to_save"], serde_json::json!(["classifier"]));
}

#[test]
fn an_adapter_embeds_as_the_merged_model_does() {
    let (dir, model) = folder();
    let data = path(encoder::queries(Path::new(&model), false));
    let out = dir.join("run");
    train(&model, &data, &out, &["--lora", "2"]);
    let (adapter, merged) = (format!("{out}/adapter"), dir.join("merged"));
    output(&[
        "merge", &model, &adapter, "--dtype", "f32", "--out", &merged,
    ]);
    let embedding = |model: &str, more: &[&str]| {
        let row = json_output(&[&["embed", model, "red rose", "--json"], more].concat());
        let values = row["embedding"].as_array().unwrap().iter();
        values.map(|x| x.as_f64().unwrap()).collect::<Vec<_>>()
    };
    let apart = |a: &[f64], b: &[f64]| {
        assert_eq!(a.len(), b.len());
        let pairs = a.iter().zip(b);
        pairs.map(|(a, b)| (a - b).abs()).fold(0., f64::max)
    };
    let with = embedding(&model, &["--adapter", &adapter]);
    assert!(apart(&with, &embedding(&merged, &[])) < 1e-5);
    assert!(apart(&with, &embedding(&model, &[])) > 1e-3);
}

#[test]
fn queries_are_trained_and_measured() {
    let (dir, model) = folder();
    let data = path(encoder::queries(Path::new(&model), true));
    let out = dir.join("run");
    let said = train(
        &model,
        &data,
        &out,
        &["--recipe", "f32", "--temperature", "0.1"],
    );
    assert!(said.contains("accuracy"), "{said}");
    let loss = |model: &str| {
        let found = json_output(&["eval", model, "--data", &data, "--batch", "6", "--json"]);
        assert_eq!(found["rows"], 60);
        found["loss"].as_f64().unwrap()
    };
    let trained = format!("{out}/model");
    assert!(loss(&trained) < loss(&model));
    for file in ["modules.json", "1_Pooling/config.json"] {
        assert!(Path::new(&format!("{trained}/{file}")).exists(), "{file}");
    }
    output(&["embed", &trained, "red rose"]);
}

/// What sentence-transformers cut is cut wherever texts are read.
#[test]
fn texts_have_the_length_that_the_model_was_trained_for() {
    let (dir, model) = folder();
    let data = path(encoder::labelled(Path::new(&model)));
    let out = dir.join("run");
    train(&model, &data, &out, &["--recipe", "f32"]);
    let trained = format!("{out}/model");
    let said = || String::from_utf8(fp8(&["eval", &trained, "--data", &data]).stderr).unwrap();
    assert!(!said().contains("are cut"), "{}", said());
    for folder in [&model, &trained] {
        let file = format!("{folder}/sentence_bert_config.json");
        std::fs::write(file, r#"{"max_seq_length": 3}"#).unwrap();
    }
    assert!(said().contains("3 tokens"), "{}", said());
    let short = dir.join("short");
    let own = ["train", &model, "--data", &data, "--out", &short];
    let told = output(&[&own[..], &["--steps", "1", "--batch", "6"]].concat());
    assert!(
        told.contains("--context is 3, as sentence_bert_config.json says"),
        "{told}"
    );
    let stored = json(&format!("{short}/run.json"));
    assert_eq!(stored["context"], 3, "{stored}");
}

/// Every token is of the first segment, and padding is what the mask says.
#[test]
fn features_are_those_of_the_first_segment() {
    let (dir, model) = folder();
    let (ids, out) = (dir.join("ids.safetensors"), dir.join("out.safetensors"));
    let row = |values: [i64; 3]| Tensor::new(&[values], &Device::Cpu).unwrap();
    let write = |tensors: &[(&str, [i64; 3])]| {
        let tensors = tensors.iter().map(|(name, values)| (*name, row(*values)));
        let tensors: HashMap<&str, Tensor> = tensors.collect();
        candle_core::safetensors::save(&tensors, &ids).unwrap();
    };
    let args = ["logits", &model, "--ids", &ids, "--out", &out];
    let (words, mask) = (("input_ids", [5, 9, 1]), ("attention_mask", [1, 1, 0]));
    write(&[words, mask, ("token_type_ids", [0, 0, 0])]);
    let said = output(&args);
    assert!(said.contains("features [1, 3, 32]"), "{said}");
    write(&[words, mask, ("token_type_ids", [0, 1, 0])]);
    let error = failure(&args);
    for part in ["ids.safetensors: token_type_ids has 1", "the first segment"] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn what_an_encoder_cannot_learn_is_said() {
    let (dir, model) = folder();
    let lines = [
        serde_json::json!({ "text": "a text" }),
        serde_json::json!({ "text": "b" }),
    ];
    let texts = path(encoder::lines(Path::new(&model), "texts.jsonl", lines));
    let out = dir.join("run");
    let refused = |data: &str, more: &[&str]| {
        let own = [
            "train",
            &model,
            "--data",
            data,
            "--out",
            &out,
            "--context",
            "24",
        ];
        let error = failure(&[&own[..], more].concat());
        assert!(!Path::new(&out).exists(), "{error}");
        error
    };
    assert!(refused(&texts, &[]).contains("it learns lines of `text` and `label`"));
    let data = path(encoder::labelled(Path::new(&model)));
    assert!(refused(&data, &["--recompute"]).contains("--recompute is for language models"));
    assert!(refused(&data, &["--no-packing"]).contains("--no-packing is for language models"));
    let error = refused(&data, &["--operands", "bf16"]);
    assert!(
        error.contains("--operands is bf16, which is for language models"),
        "{error}"
    );
    assert!(refused(&data, &["--lora", "2", "--target", "q_proj"]).contains("q_proj"));
    let queries = path(encoder::queries(Path::new(&model), false));
    assert!(refused(&queries, &["--temperature", "0"]).contains("temperature is 0"));
    assert!(refused(&queries, &["--batch", "1"]).contains("rows is 1"));
    let error = failure(&["eval", &model, "--data", &data]);
    assert!(error.contains("the model no classifier"), "{error}");
    let one = [serde_json::json!({ "query": "a rose", "positive": "red" })];
    let one = path(encoder::lines(Path::new(&model), "one.jsonl", one));
    let error = failure(&["eval", &model, "--data", &one]);
    for part in [
        "one.jsonl",
        "a single query has no other text to choose from",
    ] {
        assert!(error.contains(part), "{error}");
    }
    let error = failure(&["eval", &model, "--data", &data, "--window", "4"]);
    assert!(error.contains("--window is for language models"), "{error}");
}
