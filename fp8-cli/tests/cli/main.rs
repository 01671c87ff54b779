//! The tool `fp8`, run from the command line.

mod adapters;
mod apart;
mod card;
mod check;
mod diff;
mod embed;
mod encoders;
mod generate;
mod gguf;
mod interrupted;
mod layers;
mod pipes;
mod refused;
mod reported;
mod run;
mod search;
mod support;
mod texts;
mod train;
mod walk;
mod walk_refused;

use fp8_test_support::files;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use support::{Dir, copy, failure, golden, json_output, output, speaking, words};

#[test]
fn a_checkpoint_is_inspected() {
    let text = output(&["inspect", &golden("modelopt_fp8_kv")]);
    for part in [
        "family: modelopt",
        "model.layers.1.mlp.up_proj",
        "[320, 192]",
        "tensorwise",
        "static",
        "14 FP8 layers",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let json: Value =
        serde_json::from_str(&output(&["inspect", "--json", &golden("ct_block128")])).unwrap();
    assert_eq!(json["family"], "compressed-tensors");
    assert_eq!(json["layers"].as_array().unwrap().len(), 14);
    let layer = &json["layers"][0];
    assert_eq!(layer["granularity"], "blockwise:128x128");
    // Each of the 6 blocks has codes of 448 among its 16384.
    let saturated = layer["saturated"].as_f64().unwrap();
    assert!(
        (6. / (256. * 384.)..0.01).contains(&saturated),
        "{saturated}"
    );
    assert!(layer["dequant_scale"]["min"].as_f64() < layer["dequant_scale"]["max"].as_f64());
}

#[test]
fn weights_survive_conversions_and_come_close_after_quantization() {
    let dir = Dir::new();
    let source = golden("ct_static_tensor");
    let (modelopt, plain, again) = (dir.join("modelopt"), dir.join("plain"), dir.join("again"));
    output(&["convert", &source, "--to", "modelopt", "--out", &modelopt]);
    let text = output(&["diff", &source, &modelopt]);
    assert!(
        text.contains("21 tensors in both, 21 of them equal"),
        "{text}"
    );
    output(&["dequantize", &modelopt, "--dtype", "f32", "--out", &plain]);
    let text = output(&["diff", &source, &plain]);
    assert!(text.contains("21 of them equal"), "{text}");
    let report = output(&[
        "quantize",
        &plain,
        "--scheme",
        "mxfp8",
        "--ignore",
        "*.down_proj",
        "--json",
        "--out",
        &again,
    ]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["quantized"].as_array().unwrap().len(), 12);
    assert_eq!(report["ignored"].as_array().unwrap().len(), 3);
    let diff: Value = serde_json::from_str(&output(&["diff", "--json", &plain, &again])).unwrap();
    let rows = diff["tensors"].as_array().unwrap();
    // All but the 12 rounded ones are equal.
    let rounded = rows.iter().filter(|row| row["equal"] != true).count();
    assert!(rows.len() > 12 && rounded <= 12, "{diff}");
    for row in rows {
        let close = row["sqnr_db"].as_f64().is_some_and(|db| db > 25.);
        assert!(close || row["equal"] == true, "{row}");
    }
    // Layers that one side lacks are listed.
    let text = output(&["diff", &golden("modelopt_fp8_kv"), &plain]);
    assert!(text.contains("model.layers.0.self_attn.k_scale"), "{text}");
}

/// What candle and JSON lack: a mask of BOOL, as in GPT-2's files, and a number that Python writes.
#[test]
fn masks_and_infinite_numbers_survive_rewrites() {
    let dir = Dir::new();
    let model = copy("ct_static_tensor", &dir.join("model"));
    let path = format!("{model}/config.json");
    let config = std::fs::read_to_string(&path).unwrap();
    let more = config.replacen('{', "{\"time_step_limit\": [0.0, Infinity], ", 1);
    std::fs::write(path, more).unwrap();
    let path = Path::new(&model).join("model.safetensors");
    let stored = std::fs::read(&path).unwrap();
    let tensors = SafeTensors::deserialize(&stored).unwrap().tensors();
    let write = |mask: &[u8]| {
        let mut all: Vec<files::Entry<'_>> = tensors
            .iter()
            .map(|(name, view)| (name.as_str(), view.dtype(), view.shape(), view.data()))
            .collect();
        let name = "model.layers.0.attn.bias";
        all.push((name, Dtype::BOOL, &[1, 1, 2, 2], mask));
        files::write(&path, &all);
    };
    write(&[1, 0, 1, 1]);
    let text = output(&["inspect", &model]);
    assert!(text.contains("1 other tensors in BOOL"), "{text}");
    output(&["check", &model]);
    let (plain, again) = (dir.join("plain"), dir.join("again"));
    output(&["dequantize", &model, "--dtype", "f32", "--out", &plain]);
    output(&["convert", &model, "--to", "modelopt", "--out", &again]);
    for out in [&plain, &again] {
        let text = output(&["diff", &model, out]);
        assert!(text.contains("22 of them equal"), "{text}");
        let config = std::fs::read_to_string(format!("{out}/config.json")).unwrap();
        assert!(config.contains(" Infinity\n"), "{config}");
    }
    write(&[1, 0, 0, 1]);
    let text = output(&["diff", &model, &plain]);
    assert!(text.contains("21 of them equal"), "{text}");
}

#[test]
fn static_scales_are_made_of_given_amaxes() {
    let dir = Dir::new();
    let (plain, out, file) = (dir.join("plain"), dir.join("out"), dir.join("amaxes.json"));
    output(&["dequantize", &golden("ct_static_tensor"), "--out", &plain]);
    let line = failure(&[
        "quantize",
        &plain,
        "--scheme",
        "static-tensor",
        "--out",
        &out,
    ]);
    assert!(line.contains("--amaxes"), "{line}");
    let json: Value =
        serde_json::from_str(&output(&["inspect", "--json", &golden("ct_static_tensor")])).unwrap();
    let layers = json["layers"].as_array().unwrap().iter();
    let amaxes: HashMap<&str, f64> = layers
        .map(|layer| (layer["path"].as_str().unwrap(), 8.))
        .collect();
    std::fs::write(&file, serde_json::to_string(&amaxes).unwrap()).unwrap();
    output(&[
        "quantize",
        &plain,
        "--scheme",
        "static-tensor",
        "--to",
        "autofp8",
        "--amaxes",
        &file,
        "--out",
        &out,
    ]);
    let json: Value = serde_json::from_str(&output(&["inspect", "--json", &out])).unwrap();
    let scale = json["layers"][3]["input_dequant_scale"].as_f64().unwrap() as f32;
    assert_eq!(scale, 8. / 448.);
}

#[test]
fn static_scales_are_calibrated_on_a_text() {
    let dir = Dir::new();
    let model = speaking("ct_channel_token_bf16", &dir.join("model"));
    let (plain, text) = (dir.join("plain"), dir.join("text.txt"));
    output(&["dequantize", &model, "--dtype", "f32", "--out", &plain]);
    std::fs::write(&text, words(&[3, 4, 5, 90, 17])).unwrap();
    let calibrated = |model: &str, out: &str| {
        let out = dir.join(out);
        let scheme = ["--scheme", "static-tensor", "--calibrate", &text];
        output(&[&["quantize", model, "--out", &out][..], &scheme].concat());
        let json = json_output(&["inspect", "--json", &out]);
        let layers = json["layers"].as_array().unwrap().iter();
        let scale = |layer: &Value| layer["input_dequant_scale"].as_f64().unwrap();
        layers.map(scale).collect::<Vec<_>>()
    };
    let scales = calibrated(&plain, "of_plain");
    assert_eq!(scales.len(), 14);
    assert!(
        scales.iter().all(|&scale| (1e-5..1.).contains(&scale)),
        "{scales:?}"
    );
    // q, k and v have the same inputs, so their scales are equal. A model in FP8 runs with dequantized weights.
    let distinct: BTreeSet<u64> = scales.iter().map(|scale| scale.to_bits()).collect();
    assert_eq!(distinct.len(), 8);
    assert_eq!(calibrated(&model, "of_fp8"), scales);
}

#[test]
fn errors_are_one_line_and_leave_no_files() {
    let dir = Dir::new();
    let out = dir.join("out");
    let line = failure(&[
        "convert",
        &golden("ct_block128"),
        "--to",
        "autofp8",
        "--out",
        &out,
    ]);
    for part in [
        "model.layers.0.mlp.down_proj",
        "blockwise:128x128",
        "per group of 128",
        "one scale per weight",
    ] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let cases: [(&[&str], &str); 6] = [
        (&["inspect", "/no/such/model"], "/no/such/model"),
        (&["inspect", &dir.join("")], "holds no checkpoint"),
        (&["convert", "x", "--to", "gptq", "--out", &out], "gptq"),
        (
            &["quantize", "x", "--scheme", "int8", "--out", &out],
            "int8",
        ),
        (&["frobnicate"], "frobnicate"),
        (&[], "command"),
    ];
    for (args, part) in cases {
        let line = failure(args);
        assert!(line.contains(part), "{args:?}: {line}");
    }
    std::fs::create_dir(dir.join("taken")).unwrap();
    std::fs::write(dir.join("taken/letter.txt"), "mine").unwrap();
    let taken = dir.join("taken");
    let line = failure(&[
        "dequantize",
        &golden("ct_block128"),
        "--overwrite",
        "--out",
        &taken,
    ]);
    assert!(line.contains("config.json"), "{line}");
    assert_eq!(dir.names(), ["taken"]);
    assert!(output(&["--help"]).contains("inspect"));
}
