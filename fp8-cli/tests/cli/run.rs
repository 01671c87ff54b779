//! `fp8 eval`, `fp8 logits` and `fp8 bench`.

use crate::support::{
    Dir, copy, edit, failure, golden, json_output, logits, output, speaking, words, write_ids,
    write_tokenizer,
};
use candle_core::{DType, Device, Tensor};
use serde_json::json;
use std::collections::HashMap;

#[test]
fn perplexity_is_that_of_the_logits() {
    let dir = Dir::new();
    let model = speaking("ct_channel_token_bf16", &dir.join("model"));
    let ids: Vec<u64> = (0..23).map(|i| i * 37 % 128).collect();
    let file = dir.join("text.txt");
    std::fs::write(&file, words(&ids)).unwrap();
    // Windows of 10, 10 and 3 tokens; the first of each is not predicted.
    let mut sum = 0f64;
    for window in ids.chunks(10) {
        let rows = logits(&dir, &model, &window[..window.len() - 1], &[]);
        assert_eq!(rows.len(), window.len() - 1);
        for (row, target) in rows.iter().zip(&window[1..]) {
            let total: f64 = row.iter().map(|&x| f64::from(x).exp()).sum();
            sum += total.ln() - f64::from(row[*target as usize]);
        }
    }
    let args = ["eval", &model, "--data", &file, "--window", "10"];
    let report = json_output(&[&args[..], &["--json"]].concat());
    let close = |key: &str, expected: f64| {
        let value = report[key].as_f64().unwrap();
        assert!(
            (value / expected - 1.).abs() < 1e-5,
            "{key}: {value}, {expected}"
        );
    };
    assert_eq!(report["tokens"], 20);
    assert_eq!(report["window"], 10);
    close("nll", sum);
    close("nll_per_token", sum / 20.);
    close("perplexity", (sum / 20.).exp());
    let text = output(&args);
    let start = format!("perplexity {:.4}, ", report["perplexity"].as_f64().unwrap());
    assert!(
        text.starts_with(&start) && text.contains("20 tokens in windows of 10"),
        "{text}"
    );
    // A part of the text.
    let part = [&args[..], &["--tokens", "11", "--json"]].concat();
    assert_eq!(json_output(&part)["tokens"], 9);
}

#[test]
fn texts_without_a_perplexity_are_errors() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let (empty, text) = (dir.join("empty.txt"), dir.join("text.txt"));
    std::fs::write(&empty, "").unwrap();
    std::fs::write(&text, "w3 w4 w150").unwrap();
    let cases: [(&[&str], &str); 6] = [
        (&["--data", &empty], "empty.txt has fewer than two tokens"),
        (&["--data", "/no/such/text"], "/no/such/text"),
        (&["--data", &text, "--window", "1"], "--window is 1"),
        (
            &["--data", &text, "--window", "66"],
            "--window is 66, and the model has 64 positions",
        ),
        (&["--data", &text, "--tokens", "1"], "--tokens is 1"),
        (&[], "--data"),
    ];
    for (args, part) in cases {
        let line = failure(&[&["eval", &model][..], args].concat());
        assert!(line.contains(part), "{args:?}: {line}");
    }
    write_tokenizer(&model, 0..200);
    let line = failure(&["eval", &model, "--data", &text]);
    assert!(line.contains("150") && line.contains("128"), "{line}");
}

#[test]
fn logits_of_more_tokens_than_positions_are_refused() {
    let dir = Dir::new();
    let model = copy("ct_static_tensor", &dir.join("model"));
    edit(&format!("{model}/config.json"), |config| {
        config["max_position_embeddings"] = json!(6);
    });
    let (ids, out) = (dir.join("ids.safetensors"), dir.join("logits.safetensors"));
    let args = ["logits", &model, "--ids", &ids, "--out", &out];
    let rows = |tokens| Tensor::ones((2, tokens), DType::I64, &Device::Cpu).unwrap();
    write_ids(&ids, rows(7));
    let line = failure(&args);
    for part in [&ids, "7 tokens", "6 positions"] {
        assert!(line.contains(part), "{line}");
    }
    assert!(!std::path::Path::new(&out).exists());
    write_ids(&ids, rows(6));
    output(&args);
}

/// Padding would be read as tokens.
#[test]
fn a_mask_of_a_language_model_is_refused_unless_it_masks_nothing() {
    let dir = Dir::new();
    let model = golden("ct_static_tensor");
    let (ids, out) = (dir.join("ids.safetensors"), dir.join("logits.safetensors"));
    let row = |values: [i64; 2]| Tensor::new(&[values], &Device::Cpu).unwrap();
    let write = |mask: [i64; 2]| {
        let tensors = HashMap::from([("input_ids", row([3, 4])), ("attention_mask", row(mask))]);
        candle_core::safetensors::save(&tensors, &ids).unwrap();
    };
    let args = ["logits", &model, "--ids", &ids, "--out", &out];
    write([1, 0]);
    let line = failure(&args);
    for part in ["attention_mask has 0", "leave out padding"] {
        assert!(line.contains(part), "{line}");
    }
    assert!(!std::fs::exists(&out).unwrap());
    write([1, 1]);
    output(&args);
}

#[test]
fn logits_are_those_of_the_family() {
    let dir = Dir::new();
    for (family, options, name) in [
        ("torchao_tensor", &[][..], "logits_fp8"),
        ("ct_block128", &["--weight-only"], "logits_weight_only"),
        ("modelopt_pb_wo", &["--groups", "128"], "logits_fp8_g128"),
    ] {
        let (model, out) = (golden(family), dir.join("out.safetensors"));
        let expected = format!("{model}/expected.safetensors");
        let args = ["logits", &model, "--ids", &expected, "--out", &out];
        let text = output(&[&args[..], options].concat());
        assert!(text.contains("[2, 16, 128]"), "{family}: {text}");
        let load = |path: &str| candle_core::safetensors::load(path, &Device::Cpu).unwrap();
        let values = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let (ours, theirs) = (load(&out), load(&expected));
        let (ours, theirs) = (values(&ours["logits"]), values(&theirs[name]));
        assert_eq!(ours.len(), theirs.len(), "{family}");
        let square = |x: f32| f64::from(x) * f64::from(x);
        let signal: f64 = theirs.iter().map(|&x| square(x)).sum();
        let noise: f64 = ours.iter().zip(&theirs).map(|(a, b)| square(a - b)).sum();
        let db = 10. * (signal / noise).log10();
        assert!(db > 110., "{family}: {db} dB");
    }
}

#[test]
fn invalid_ids_are_refused_and_an_existing_file_stays() {
    let dir = Dir::new();
    let model = golden("ct_static_tensor");
    let (ids, out) = (dir.join("ids.safetensors"), dir.join("out.safetensors"));
    std::fs::write(&out, "mine").unwrap();
    let cpu = &Device::Cpu;
    let cases = [
        (
            Tensor::new(&[[3i64, 128]], cpu),
            "128 is not in the vocabulary of 128",
        ),
        (
            Tensor::new(&[[3i64, -1]], cpu),
            "-1 is not in the vocabulary",
        ),
        (Tensor::new(&[3u32, 4], cpu), "[2]"),
        (Tensor::new(&[[3f32, 4.]], cpu), "f32"),
    ];
    for (tensor, part) in cases {
        write_ids(&ids, tensor.unwrap());
        let line = failure(&["logits", &model, "--ids", &ids, "--out", &out]);
        assert!(
            line.contains(part) && line.contains("ids.safetensors"),
            "{line}"
        );
    }
    let weights = format!("{model}/model.safetensors");
    let line = failure(&["logits", &model, "--ids", &weights, "--out", &out]);
    assert!(line.contains("no tensor `input_ids`"), "{line}");
    let line = failure(&["logits", &model, "--ids", "/no/such/ids", "--out", &out]);
    assert!(line.contains("/no/such/ids"), "{line}");
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "mine");
    // Good ids replace it; a directory is not replaced.
    write_ids(&ids, Tensor::new(&[[3u32, 4]], cpu).unwrap());
    output(&["logits", &model, "--ids", &ids, "--out", &out]);
    let written = candle_core::safetensors::load(&out, cpu).unwrap();
    assert_eq!(written["logits"].dims(), [1, 2, 128]);
    std::fs::create_dir(dir.join("taken")).unwrap();
    let line = failure(&["logits", &model, "--ids", &ids, "--out", &dir.join("taken")]);
    assert!(line.contains("taken"), "{line}");
    let missing = dir.join("no/such.safetensors");
    let line = failure(&["logits", &model, "--ids", &ids, "--out", &missing]);
    assert!(line.contains("does not exist"), "{line}");
    assert_eq!(dir.names(), ["ids.safetensors", "out.safetensors", "taken"]);
}

#[test]
fn speed_is_measured() {
    let dir = Dir::new();
    // No tokenizer is needed.
    let model = copy("ct_static_tensor", &dir.join("model"));
    let args = [
        "bench",
        &model,
        "--prefill",
        "24",
        "--decode",
        "3",
        "--repeats",
        "1",
    ];
    let report = json_output(&[&args[..], &["--json"]].concat());
    assert_eq!(report["prefill_tokens"], 24);
    assert_eq!(report["decode_tokens"], 3);
    for key in [
        "prefill_tokens_per_second",
        "decode_tokens_per_second",
        "threads",
    ] {
        assert!(report[key].as_f64().unwrap() > 0., "{key}: {report}");
    }
    // Two layers of q, k, v, o and gate, up, down, a byte for each code and a scale for each matrix.
    let codes = 2 * (2 * 192 * 192 + 2 * 64 * 192 + 3 * 320 * 192);
    let bytes = codes + 14 * 4;
    assert_eq!(report["linear_weight_bytes"], bytes);
    let share = report["linear_weight_bytes_over_f32"].as_f64().unwrap();
    assert_eq!(share, f64::from(bytes) / f64::from(4 * codes));
    let text = output(&args);
    for part in [
        "prefill",
        "(24 tokens)",
        "decode",
        "(3 tokens)",
        "565.3 kB, 0.250 of f32's",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let high = dir.join("high");
    output(&["dequantize", &model, "--dtype", "bf16", "--out", &high]);
    let args = [
        "bench",
        &high,
        "--prefill",
        "2",
        "--decode",
        "1",
        "--repeats",
        "1",
    ];
    let report = json_output(&[&args[..], &["--json", "--dtype", "bf16"]].concat());
    assert_eq!(report["linear_weight_bytes_over_f32"], 0.5);
}

#[test]
fn lengths_that_cannot_be_measured_are_errors() {
    let model = golden("ct_static_tensor");
    let most = usize::MAX.to_string();
    let cases: [(&[&str], &str); 7] = [
        (&["--prefill", "0"], "--prefill is 0"),
        (&["--decode", "0"], "--decode is 0"),
        (&["--repeats", "0"], "--repeats is 0"),
        (&["--prefill", "many"], "many"),
        (&["--prefill", &most], &most),
        (
            &["--prefill", "99999999999999999"],
            "99999999999999999 tokens",
        ),
        (&["--decode", &most], &most),
    ];
    for (args, part) in cases {
        let line = failure(&[&["bench", &model][..], args].concat());
        assert!(line.contains(part), "{args:?}: {line}");
    }
}
