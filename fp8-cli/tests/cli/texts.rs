//! The texts that models are measured on: what is cut off, and bytes that are no text.

use crate::support::{Dir, failure, fp8, json_output, output, speaking, text};
use serde_json::{Value, json};

#[test]
fn documents_that_are_cut_off_are_said() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let lines = [
        json!({ "prompt": "w1 w3", "completion": " w4 w5 w6 w7" }),
        json!({ "prompt": "w1 w3 w4 w5 w6", "completion": " w7" }),
        json!({ "prompt": "w3", "completion": " w4" }),
    ];
    let file = dir.join("lines.jsonl");
    std::fs::write(&file, lines.map(|line| line.to_string()).join("\n")).unwrap();
    let args = ["eval", &model, "--data", &file, "--json"];
    let eval = |more: &[&str]| {
        let output = fp8(&[&args[..], more].concat());
        let errors = text(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        (report["tokens"].as_u64().unwrap(), errors)
    };
    // All of the completions, and the end of each document.
    assert_eq!(eval(&[]), (5 + 2 + 2, String::new()));
    // Each of the first two has seven tokens with its end. Of the second one, only the prompt is left.
    let (tokens, errors) = eval(&["--window", "4"]);
    assert_eq!(tokens, 2 + 2);
    for part in [
        "lines.jsonl: documents longer than 4 tokens are cut at their ends: 2 of 3, by 6 tokens in all",
        "lines.jsonl: pieces in which there is nothing to measure are left out: 1, of 4 tokens in all",
    ] {
        assert!(errors.contains(part), "{part}: {errors}");
    }
}

/// As `fp8 train` refuses it.
#[test]
fn bytes_that_are_no_text_are_not_measured() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let (latin, out) = (dir.join("latin.txt"), dir.join("out"));
    std::fs::write(&latin, b"w3 w4 w5 \xfc").unwrap();
    let calibrate = ["--scheme", "static-tensor", "--calibrate", &latin];
    for args in [
        vec!["eval", &model, "--data", &latin],
        [&["quantize", &model, "--out", &out], &calibrate[..]].concat(),
        vec!["quantize", &model, "--out", &out, "--eval", &latin],
    ] {
        let line = failure(&args);
        assert!(
            line.contains("latin.txt") && line.contains("not UTF-8 at byte 9"),
            "{args:?}: {line}"
        );
    }
    assert!(!std::fs::exists(&out).unwrap());
}

#[test]
fn a_byte_order_mark_is_no_part_of_a_text() {
    let dir = Dir::new();
    let model = speaking("ct_static_tensor", &dir.join("model"));
    let (plain, marked) = (dir.join("plain.txt"), dir.join("marked.txt"));
    std::fs::write(&plain, "w3 w4 w5").unwrap();
    std::fs::write(&marked, "\u{feff}w3 w4 w5").unwrap();
    let [one, other] =
        [&plain, &marked].map(|file| json_output(&["eval", &model, "--data", file, "--json"]));
    assert_eq!(one, other);
    let calibrated = |file: &str| {
        let out = dir.join("out");
        let scheme = ["--scheme", "static-tensor", "--calibrate", file];
        output(
            &[
                &["quantize", &model, "--overwrite", "--out", &out][..],
                &scheme,
            ]
            .concat(),
        );
        std::fs::read(format!("{out}/model.safetensors")).unwrap()
    };
    assert!(calibrated(&plain) == calibrated(&marked));
}
