//! `fp8 embed`.

use crate::support::{Dir, failure, fp8, json_output, output, speaking, words, write_tokenizer};
use candle_core::{DType, Device, Tensor};
use serde_json::{Value, json};
use std::collections::HashMap;

/// A small BERT of random weights with a tokenizer of 40 words.
fn encoder(dir: &Dir) -> String {
    let path = dir.join("encoder");
    std::fs::create_dir(&path).unwrap();
    let config = json!({
        "model_type": "bert", "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 12,
    });
    std::fs::write(format!("{path}/config.json"), config.to_string()).unwrap();
    write_tokenizer(&path, 0..40);
    let layer = "encoder.layer.0";
    let mut tensors = HashMap::new();
    let mut add = |name: String, shape: &[usize]| {
        // Values with a long period.
        let count: usize = shape.iter().product();
        let start = tensors.len() as f32;
        let values: Vec<f32> = (0..count).map(|i| (start + i as f32 * 1.7).sin()).collect();
        let tensor = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
        tensors.insert(name, tensor);
    };
    for (name, rows) in [("word", 40), ("position", 12), ("token_type", 2)] {
        add(format!("embeddings.{name}_embeddings.weight"), &[rows, 32]);
    }
    for (name, n, k) in [
        ("attention.self.query", 32, 32),
        ("attention.self.key", 32, 32),
        ("attention.self.value", 32, 32),
        ("attention.output.dense", 32, 32),
        ("intermediate.dense", 64, 32),
        ("output.dense", 32, 64),
    ] {
        add(format!("{layer}.{name}.weight"), &[n, k]);
        add(format!("{layer}.{name}.bias"), &[n]);
    }
    for norm in [
        "embeddings".to_string(),
        format!("{layer}.attention.output"),
        format!("{layer}.output"),
    ] {
        let ones = Tensor::ones(32, DType::F32, &Device::Cpu).unwrap();
        let zeros = ones.zeros_like().unwrap();
        tensors.insert(format!("{norm}.LayerNorm.weight"), ones);
        tensors.insert(format!("{norm}.LayerNorm.bias"), zeros);
    }
    candle_core::safetensors::save(&tensors, format!("{path}/model.safetensors")).unwrap();
    path
}

/// The JSON objects that are printed, one per line.
#[track_caller]
fn rows(args: &[&str]) -> Vec<Value> {
    let text = output(args);
    let rows = text.lines().map(|line| serde_json::from_str(line).unwrap());
    rows.collect()
}

fn vectors(rows: &[Value]) -> Vec<Vec<f64>> {
    let vector = |row: &Value| {
        let numbers = row["embedding"].as_array().unwrap();
        numbers.iter().map(|x| x.as_f64().unwrap()).collect()
    };
    rows.iter().map(vector).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[test]
fn texts_get_their_vectors_in_order() {
    let dir = Dir::new();
    let model = encoder(&dir);
    let texts = ["w3 w4 w5 w6", "w7", "w8 w9"];
    let [a, b, c] = texts;
    let report = rows(&["embed", &model, "--json", a, b, c]);
    assert_eq!(report.len(), 3);
    let all = vectors(&report);
    for (i, text) in texts.iter().enumerate() {
        assert_eq!(report[i]["text"], *text);
        assert_eq!(all[i].len(), 32);
        // The vector has length 1 and equals that of the text alone, whose batch has no padding.
        assert!((dot(&all[i], &all[i]) - 1.).abs() < 1e-5);
        let alone = &vectors(&rows(&["embed", &model, "--json", text]))[0];
        let cosine = dot(&all[i], alone);
        assert!((cosine - 1.).abs() < 1e-5, "{text}: {cosine}");
    }
    assert!(dot(&all[0], &all[1]) < 0.999);
    // From a file and printed as text, one line per text.
    let file = dir.join("texts.txt");
    std::fs::write(&file, format!("{a}\n\n{b}\n  \n{c}\n")).unwrap();
    let lines = output(&["embed", &model, "--data", &file]);
    assert_eq!(lines.lines().count(), 3);
    for (line, vector) in lines.lines().zip(&all) {
        let numbers: Vec<f64> = line.split(' ').map(|x| x.parse().unwrap()).collect();
        assert!((dot(&numbers, vector) - 1.).abs() < 1e-5);
    }
    // In FP8 it is nearly the same.
    let fp8 = dir.join("fp8");
    output(&["quantize", &model, "--out", &fp8]);
    let rounded = vectors(&rows(&["embed", &fp8, "--json", a, b, c]));
    assert_eq!(rounded.len(), 3);
    for (rounded, exact) in rounded.iter().zip(&all) {
        let cosine = dot(rounded, exact);
        assert!((0.98..0.999_999).contains(&cosine), "{cosine}");
    }
}

#[test]
fn files_of_sentence_encoders_are_respected() {
    let dir = Dir::new();
    let model = encoder(&dir);
    let embed = |text: &str| vectors(&rows(&["embed", &model, "--json", text])).remove(0);
    let mean = embed("w3 w4 w5");
    // Texts are cut to the model's positions, or to the length it was trained for.
    let longest = "w3 w4 w5 w6 w7 w8 w9 w10 w11 w12 w13 w14";
    let longer = format!("{longest} w15 w16");
    assert_eq!(embed(&longer), embed(longest));
    let warning = |text: &str| {
        let out = fp8(&["embed", &model, "--json", "w3", text]);
        String::from_utf8(out.stderr).unwrap()
    };
    let said = warning(&longer);
    assert!(
        said.contains("12 tokens are cut") && said.contains("1 of 2"),
        "{said}"
    );
    assert_eq!(warning(longest), "");
    std::fs::write(
        format!("{model}/sentence_bert_config.json"),
        r#"{"max_seq_length": 3}"#,
    )
    .unwrap();
    assert_eq!(embed(longest), mean);
    std::fs::create_dir(format!("{model}/1_Pooling")).unwrap();
    let pooling = format!("{model}/1_Pooling/config.json");
    std::fs::write(&pooling, r#"{"pooling_mode_cls_token": true}"#).unwrap();
    let first = embed("w3 w4 w5");
    assert!(dot(&first, &mean) < 0.999);
    std::fs::write(&pooling, r#"{"pooling_mode_max_tokens": true}"#).unwrap();
    let line = failure(&["embed", &model, "w3"]);
    assert!(
        line.contains("1_Pooling/config.json") && line.contains("max_tokens"),
        "{line}"
    );
}

/// An embedding without its dense layer would be another; a rewritten folder has it for those who compute it.
#[test]
fn modules_that_are_not_computed_are_refused_and_copied() {
    let dir = Dir::new();
    let model = encoder(&dir);
    let module = |path: &str, class: &str| {
        let class = format!("sentence_transformers.models.{class}");
        json!({ "path": path, "type": class })
    };
    let write = |last: Value| {
        let first = [module("", "Transformer"), module("1_Pooling", "Pooling")];
        let modules = Value::from([&first[..], &[last]].concat());
        std::fs::write(format!("{model}/modules.json"), modules.to_string()).unwrap();
    };
    write(module("2_Dense", "Dense"));
    std::fs::create_dir(format!("{model}/2_Dense")).unwrap();
    std::fs::write(format!("{model}/2_Dense/model.safetensors"), "dense").unwrap();
    std::fs::create_dir(format!("{model}/other")).unwrap();
    std::fs::write(format!("{model}/other/file"), "of something else").unwrap();
    let line = failure(&["embed", &model, "w3"]);
    for part in [
        "modules.json",
        "models.Dense",
        "Transformer, Pooling or Normalize",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let fp8 = dir.join("fp8");
    // A card would compare embeddings: nothing is written first.
    let texts = dir.join("texts.txt");
    std::fs::write(&texts, "w3 w4\n").unwrap();
    let line = failure(&["quantize", &model, "--out", &fp8, "--eval", &texts]);
    assert!(line.contains("models.Dense"), "{line}");
    assert!(!std::fs::exists(&fp8).unwrap());
    // Some files end a folder with a slash.
    write(module("2_Dense/", "Dense"));
    let said = output(&["quantize", &model, "--out", &fp8]);
    assert!(said.contains("  2_Dense/model.safetensors\n"), "{said}");
    let copy = std::fs::read_to_string(format!("{fp8}/2_Dense/model.safetensors")).unwrap();
    assert_eq!(copy, "dense");
    assert!(!std::fs::exists(format!("{fp8}/other")).unwrap());
    write(module("../elsewhere", "Pooling"));
    let line = failure(&["embed", &model, "w3"]);
    assert!(line.contains("a folder beside the file"), "{line}");
    write(module("2_Normalize", "Normalize"));
    // Without the file of the pooling there is nothing to guess.
    let line = failure(&["embed", &model, "w3"]);
    assert!(
        line.contains("1_Pooling/config.json") && line.contains("is missing"),
        "{line}"
    );
    std::fs::create_dir(format!("{model}/1_Pooling")).unwrap();
    let pooling = format!("{model}/1_Pooling/config.json");
    std::fs::write(pooling, r#"{"pooling_mode_mean_tokens": true}"#).unwrap();
    let length = || {
        let vector = vectors(&rows(&["embed", &model, "--json", "w3 w4"])).remove(0);
        dot(&vector, &vector).sqrt()
    };
    assert!((length() - 1.).abs() < 1e-5);
    // Without the module, vectors have the length that the pooling gives them.
    write(module("", "Transformer"));
    assert!((length() - 1.).abs() > 0.1, "{}", length());
}

#[test]
fn texts_without_a_vector_are_errors() {
    let dir = Dir::new();
    let model = encoder(&dir);
    let (empty, two) = (dir.join("empty.txt"), dir.join("two.txt"));
    std::fs::write(&empty, "\n  \n").unwrap();
    std::fs::write(&two, "w3\nw4\n").unwrap();
    let cases: [(&[&str], &str); 5] = [
        (&["--data", &empty], "empty.txt has no text"),
        (&["--data", "/no/such/text"], "/no/such/text"),
        (&["--data", &two, "w3"], "--data"),
        (&[], "TEXTS"),
        (&["w3", ""], "\"\" has no tokens"),
    ];
    for (args, part) in cases {
        let line = failure(&[&["embed", &model][..], args].concat());
        assert!(line.contains(part), "{args:?}: {line}");
    }
    let llama = speaking("ct_static_tensor", &dir.join("llama"));
    let line = failure(&["embed", &llama, "w3"]);
    assert!(line.contains("not an encoder"), "{line}");
    for args in [
        vec!["generate", &model, "--prompt", "w3"],
        vec!["bench", &model],
    ] {
        let line = failure(&args);
        assert!(line.contains("not a language model"), "{args:?}: {line}");
    }
    write_tokenizer(&model, 0..60);
    let line = failure(&["embed", &model, "w50"]);
    assert!(
        line.contains("50") && line.contains("vocabulary of 40"),
        "{line}"
    );
    std::fs::remove_file(format!("{model}/tokenizer.json")).unwrap();
    let line = failure(&["embed", &model, "w3"]);
    assert!(line.contains("encoder/tokenizer.json"), "{line}");
}

#[test]
fn calibration_cuts_its_samples_to_the_positions_of_the_model() {
    let dir = Dir::new();
    let model = encoder(&dir);
    let (text, out) = (dir.join("text.txt"), dir.join("fp8"));
    std::fs::write(&text, words(&(0..40).collect::<Vec<u64>>())).unwrap();
    let args = [
        "quantize",
        &model,
        "--scheme",
        "static-tensor",
        "--calibrate",
        &text,
        "--out",
        &out,
    ];
    output(&args);
    let json = json_output(&["inspect", "--json", &out]);
    let layers = json["layers"].as_array().unwrap();
    assert!(!layers.is_empty(), "{json}");
    for layer in layers {
        let scale = layer["input_dequant_scale"].as_f64();
        assert!(scale.is_some_and(|scale| scale > 0.), "{layer}");
    }
}
