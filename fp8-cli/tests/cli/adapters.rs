//! `fp8 merge`, and `--adapter` of the commands that run a model.

use crate::support::{Dir, failure, fp8, json_output, output, text, write_ids, write_tokenizer};
use candle_core::{Device, Tensor};
use fp8_test_support::golden_models::write_model;
use fp8_test_support::{golden, sqnr};
use std::path::Path;

/// The Llama of the golden adapters, which speaks, and ids for it.
fn base(dir: &Dir) -> (String, String) {
    let (model, ids) = (dir.join("model"), dir.join("ids.safetensors"));
    std::fs::create_dir(&model).unwrap();
    let golden = write_model("llama", Path::new(&model));
    write_tokenizer(&model, 0..48);
    write_ids(&ids, golden.ids);
    (model, ids)
}

fn adapter(name: &str) -> String {
    let path = golden("adapters").join(name);
    path.to_str().unwrap().to_string()
}

fn logits(dir: &Dir, model: &str, ids: &str, more: &[&str]) -> Tensor {
    let out = dir.join("logits.safetensors");
    output(&[&["logits", model, "--ids", ids, "--out", &out][..], more].concat());
    let tensors = candle_core::safetensors::load(&out, &Device::Cpu).unwrap();
    tensors["logits"].clone()
}

fn expected(name: &str) -> Tensor {
    let path = golden("adapters").join("expected.safetensors");
    let tensors = candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    tensors[&format!("{name}.output")].clone()
}

#[test]
fn logits_with_an_adapter_are_those_of_peft_and_of_the_merged_model() {
    let dir = Dir::new();
    let (model, ids) = base(&dir);
    for name in ["llama.names", "llama.all"] {
        let tuned = adapter(name);
        let with = logits(&dir, &model, &ids, &["--adapter", &tuned]);
        let close = sqnr(&expected(name), &with);
        assert!(close >= 110., "{name}: {close} dB");
        let out = dir.join(name);
        let said = fp8(&["merge", &model, &tuned, "--out", &out, "--dtype", "f32"]);
        let errors = text(&said.stderr);
        assert!(
            said.status.success() && errors.contains("layers have an update"),
            "{errors}"
        );
        let close = sqnr(&with, &logits(&dir, &out, &ids, &[]));
        assert!(close >= 105., "{name}: {close} dB");
        // The tokenizer comes along.
        assert!(Path::new(&out).join("tokenizer.json").is_file());
    }
}

#[test]
fn an_adapter_is_merged_straight_into_fp8() {
    let dir = Dir::new();
    let (model, ids) = base(&dir);
    let tuned = adapter("llama.all");
    let (plain, two, one) = (dir.join("plain"), dir.join("two"), dir.join("one"));
    output(&["merge", &model, &tuned, "--dtype", "f32", "--out", &plain]);
    let scheme = [
        "--scheme",
        "channel-token",
        "--to",
        "compressed-tensors",
        "--ignore",
        "*.o_proj",
    ];
    output(&[&["quantize", &plain, "--out", &two][..], &scheme].concat());
    let args = [
        &["merge", &model, &tuned, "--json", "--out", &one][..],
        &scheme,
    ]
    .concat();
    let report = json_output(&args);
    assert_eq!(report["quantized"].as_array().unwrap().len(), 12);
    // The same codes and scales; what stays in high precision has the base's dtype in one and f32 in the other.
    let diff = json_output(&["diff", "--json", &one, &two]);
    let rows = diff["tensors"].as_array().unwrap();
    let quantized = |row: &&serde_json::Value| {
        let name = row["name"].as_str().unwrap();
        name.contains("_proj") && !name.contains("o_proj")
    };
    let rows: Vec<_> = rows.iter().filter(quantized).collect();
    assert_eq!(rows.len(), 12);
    assert!(rows.iter().all(|row| row["equal"] == true), "{diff}");
    assert_eq!(logits(&dir, &one, &ids, &[]).dims(), [2, 12, 48]);
    // Static scales come from the model with its adapter.
    let (data, fixed) = (dir.join("text.txt"), dir.join("static"));
    std::fs::write(&data, "w3 w4 w5 w6 w7").unwrap();
    let scheme = ["--scheme", "static-tensor", "--calibrate", &data];
    output(&[&["merge", &model, &tuned, "--out", &fixed][..], &scheme].concat());
    assert!(output(&["inspect", &fixed]).contains("static"));
}

#[test]
fn text_and_perplexity_are_those_of_the_merged_model() {
    let dir = Dir::new();
    let (model, _) = base(&dir);
    let tuned = adapter("llama.names");
    let (merged, data) = (dir.join("merged"), dir.join("text.txt"));
    output(&["merge", &model, &tuned, "--dtype", "f32", "--out", &merged]);
    std::fs::write(&data, "w3 w4 w5 w6 w7 w8 w9 w10 w11 w12").unwrap();
    let generated = |model: &str, more: &[&str]| {
        let args = [
            "generate",
            model,
            "--prompt",
            "w3 w4",
            "--max-tokens",
            "12",
            "--json",
        ];
        let report = json_output(&[&args[..], more].concat());
        report["outputs"][0]["tokens"].clone()
    };
    let with = generated(&model, &["--adapter", &tuned]);
    assert_eq!(with, generated(&merged, &[]));
    assert_ne!(with, generated(&model, &[]));
    let perplexity = |model: &str, more: &[&str]| {
        let args = [&["eval", model, "--data", &data, "--json"][..], more].concat();
        json_output(&args)["nll_per_token"].as_f64().unwrap()
    };
    let (with, merged) = (
        perplexity(&model, &["--adapter", &tuned]),
        perplexity(&merged, &[]),
    );
    assert!((with - merged).abs() < 1e-4 * with, "{with} {merged}");
    assert!((with - perplexity(&model, &[])).abs() > 0.01 * with);
    let bench = ["bench", &model, "--prefill", "2", "--decode", "2"];
    output(&[&bench[..], &["--adapter", &tuned]].concat());
}

#[test]
fn an_adapter_is_not_added_twice() {
    let dir = Dir::new();
    let (model, ids) = base(&dir);
    let tuned = adapter("llama.names");
    let (once, out) = (dir.join("once"), dir.join("out"));
    output(&["merge", &model, &tuned, "--out", &once]);
    for args in [
        vec!["merge", &once, &tuned, "--out", &out],
        vec![
            "logits",
            &once,
            "--adapter",
            &tuned,
            "--ids",
            &ids,
            "--out",
            &out,
        ],
    ] {
        let line = failure(&args);
        assert!(line.contains("already"), "{args:?}: {line}");
    }
    assert!(!Path::new(&out).exists());
    output(&["merge", &once, &adapter("llama.all"), "--out", &out]);
}

#[test]
fn what_does_not_fit_is_named() {
    let dir = Dir::new();
    let (model, ids) = base(&dir);
    let out = dir.join("out");
    for (other, parts) in [
        (
            adapter("qwen3.layers"),
            [
                "base_model.model.model.layers.1.self_attn.o_proj.lora_A.weight",
                "shape",
            ],
        ),
        (
            adapter("phi3.fused"),
            ["gate_up_proj.lora_A.weight", "no targeted linear layer"],
        ),
        (dir.join("nothing"), ["adapter_config.json", "cannot read"]),
    ] {
        for args in [
            vec!["merge", &model, &other, "--out", &out],
            vec![
                "logits",
                &model,
                "--adapter",
                &other,
                "--ids",
                &ids,
                "--out",
                &out,
            ],
            vec!["generate", &model, "--adapter", &other, "--prompt", "w3"],
        ] {
            let line = failure(&args);
            for part in parts {
                assert!(line.contains(part), "{args:?}: {line}");
            }
        }
    }
    let tuned = adapter("llama.all");
    let line = failure(&["merge", &model, &tuned, "--out", &out, "--head"]);
    assert!(
        line.contains("--head is for FP8: it needs --scheme"),
        "{line}"
    );
    let scheme = ["--scheme", "mxfp8", "--dtype", "f32"];
    failure(&[&["merge", &model, &tuned, "--out", &out][..], &scheme].concat());
    let line = failure(&["merge", "/no/such/model", &tuned, "--out", &out]);
    assert!(line.contains("/no/such/model"), "{line}");
    assert!(!Path::new(&out).exists());
}
