//! `fp8 quantize --search`: codes that keep the errors of outputs small.

use crate::support::*;
use serde_json::Value;

/// A model in high precision with a tokenizer, and the text `w3 w10 ..` of so many words.
fn model(dir: &Dir, count: u64) -> (String, String) {
    let fp8 = speaking("ct_channel_token_bf16", &dir.join("fp8"));
    let (plain, text) = (dir.join("plain"), dir.join("text.txt"));
    output(&["dequantize", &fp8, "--dtype", "f32", "--out", &plain]);
    let ids: Vec<u64> = (0..count).map(|i| 3 + i * i * 7 % 120).collect();
    std::fs::write(&text, words(&ids)).unwrap();
    (plain, text)
}

/// How many tensors of two models differ in value.
fn differing(a: &str, b: &str) -> usize {
    let diff = json_output(&["diff", "--json", a, b]);
    let rows = diff["tensors"].as_array().unwrap();
    rows.iter().filter(|row| row["equal"] != true).count()
}

#[test]
fn searched_files_have_the_form_of_plain_ones() {
    let dir = Dir::new();
    let (model, text) = model(&dir, 300);
    for (scheme, to) in [
        ("channel-token", "modelopt"),
        ("mxfp8", "compressed-tensors"),
    ] {
        let (plain, searched) = (dir.join(scheme), dir.join(&format!("{scheme}-searched")));
        let form = ["--scheme", scheme, "--to", to, "--json", "--out"];
        let report = json_output(&[&["quantize", &model][..], &form, &[&plain]].concat());
        let search = [&searched[..], "--search", &text, "--samples", "4"];
        let (again, errors) =
            report_and_errors(&[&["quantize", &model][..], &form, &search].concat());
        assert!(
            errors.contains("of the outputs of 14 layers on the samples"),
            "{errors}"
        );
        for key in ["files", "quantized", "ignored", "bytes"] {
            assert_eq!(report[key], again[key], "{key}");
        }
        let layers = |dir: &str| -> Vec<Value> {
            let json = json_output(&["inspect", "--json", dir]);
            let layers = json["layers"].as_array().unwrap().iter();
            let keys = ["path", "shape", "granularity", "inputs", "bytes"];
            layers
                .map(|layer| keys.map(|key| layer[key].clone()).to_vec().into())
                .collect()
        };
        assert_eq!(layers(&plain), layers(&searched));
        let config = |dir: &str| std::fs::read_to_string(format!("{dir}/config.json")).unwrap();
        assert_eq!(config(&plain), config(&searched));
        // All 14 layers have other codes, and with MXFP8 norms have other weights; nothing else has changed.
        let retuned = errors
            .split_once("smaller rounding errors in ")
            .map(|(_, rest)| rest);
        let retuned = retuned.and_then(|rest| rest.split_once(" norms"));
        let retuned = retuned.map_or(0, |(count, _)| count.parse().unwrap());
        assert_eq!(retuned > 0, scheme == "mxfp8", "{errors}");
        assert_eq!(differing(&plain, &searched), 14 + retuned);
    }
}

#[test]
fn a_search_text_calibrates_static_scales_too() {
    let dir = Dir::new();
    let (model, text) = model(&dir, 200);
    let (out, other) = (dir.join("out"), dir.join("other"));
    let scheme = ["--scheme", "static-tensor", "--samples", "1"];
    output(
        &[
            &["quantize", &model, "--out", &out, "--search", &text][..],
            &scheme,
        ]
        .concat(),
    );
    output(
        &[
            &["quantize", &model, "--out", &other, "--calibrate", &text][..],
            &scheme,
        ]
        .concat(),
    );
    let scales = |dir: &str| {
        let json = json_output(&["inspect", "--json", dir]);
        let layers = json["layers"].as_array().unwrap().iter();
        let scale = |layer: &Value| layer["input_dequant_scale"].as_f64().unwrap();
        layers.map(scale).collect::<Vec<_>>()
    };
    assert_eq!(scales(&out), scales(&other));
    assert_eq!(differing(&out, &other), 14);
}

#[test]
fn searches_without_enough_text_are_refused() {
    let dir = Dir::new();
    let (model, text) = model(&dir, 20);
    let out = dir.join("out");
    let line = failure(&["quantize", &model, "--search", &text, "--out", &out]);
    for part in ["text.txt", "20 tokens", "at least 64"] {
        assert!(line.contains(part), "{line}");
    }
    std::fs::write(&text, "").unwrap();
    let line = failure(&["quantize", &model, "--search", &text, "--out", &out]);
    assert!(line.contains("text.txt: no token"), "{line}");
    assert!(!std::path::Path::new(&out).exists());
}

/// The report of a command that succeeds, and what it writes to stderr.
fn report_and_errors(args: &[&str]) -> (Value, String) {
    let output = fp8(args);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    (serde_json::from_slice(&output.stdout).unwrap(), errors)
}
