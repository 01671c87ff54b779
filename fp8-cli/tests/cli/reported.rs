//! What a written model holds that was not asked for is in the report, and on stderr without `--json`.

use crate::support::{Dir, copy, fp8, json_output, output, text};
use serde_json::json;

/// What a command that succeeds writes to stderr.
fn errors(args: &[&str]) -> String {
    let output = fp8(args);
    let errors = text(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    errors
}

/// A copy of a model in which a layer has another name of the same length.
fn renamed(model: &str, to: &str, [layer, name]: [&str; 2]) -> String {
    assert_eq!(layer.len(), name.len());
    let model = copy(model, to);
    let path = format!("{model}/model.safetensors");
    let mut file = std::fs::read(&path).unwrap();
    for at in 0..file.len() - layer.len() {
        if file[at..].starts_with(layer.as_bytes()) {
            file[at..at + layer.len()].copy_from_slice(name.as_bytes());
        }
    }
    std::fs::write(path, file).unwrap();
    model
}

#[test]
fn a_table_that_is_dequantized_is_named() {
    let dir = Dir::new();
    let table = "model.layers.0.mlp.embedding";
    let names = ["model.layers.0.mlp.down_proj", table];
    let model = renamed("torchao_row", &dir.join("model"), names);
    let out = dir.join("out");
    let args = [
        "convert",
        &model,
        "--to",
        "compressed-tensors",
        "--out",
        &out,
    ];
    let said = errors(&args);
    let expected = format!(
        "warning: FP8 weights of the source that are in high precision in the output: 1 (first {table})\n"
    );
    assert_eq!(said, expected);
    let report = json_output(&[&args[..], &["--overwrite", "--json"]].concat());
    assert_eq!(report["dequantized"], json!([table]));
    // Where all of it was to be dequantized, nothing is unexpected.
    let said = errors(&["dequantize", &model, "--out", &dir.join("plain")]);
    assert_eq!(said, "");
}

#[test]
fn layers_that_vllm_does_not_read_are_named() {
    let dir = Dir::new();
    let layer = "model.layers.0.mlp.up_proj_2";
    let names = ["model.layers.0.mlp.down_proj", layer];
    let model = renamed("ct_static_tensor", &dir.join("model"), names);
    let (plain, out) = (dir.join("plain"), dir.join("out"));
    output(&["dequantize", &model, "--out", &plain]);
    let ignored = "model.layers.0.mlp.up_proj";
    let args = [
        "quantize",
        &plain,
        "--scheme",
        "channel-token",
        "--to",
        "modelopt",
        "--ignore",
        ignored,
        "--out",
        &out,
    ];
    let said = errors(&args);
    let expected = format!(
        "warning: vLLM does not read 1 of the layers as FP8 in this spelling (first {layer})\n"
    );
    assert_eq!(said, expected);
    let report = json_output(&[&args[..], &["--overwrite", "--json"]].concat());
    assert_eq!(report["unread_by_vllm"], json!([layer]));
}
