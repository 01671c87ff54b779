//! Lists of layers in high precision as engines read them, and layers that an engine does not read.

use crate::helpers::*;
use candle_core::{DType, Tensor};
use fp8_files::rewrite::{self, QuantizeOptions, Scheme, Spelling, WriteReport};
use fp8_files::{Error, Result};
use std::collections::HashMap;
use std::path::Path;

/// Writes linear layers at these paths.
fn layers_at(dir: &Path, paths: &[&str]) {
    std::fs::create_dir(dir).unwrap();
    let tensors: HashMap<String, Tensor> = (1..)
        .zip(paths)
        .map(|(seed, path)| (format!("{path}.weight"), tensor(seed, &[128, 128])))
        .collect();
    candle_core::safetensors::save(&tensors, dir.join("model.safetensors")).unwrap();
}

/// Quantizes layers at `paths` but the one at `ignored`.
fn quantize(dir: &Path, paths: &[&str], ignored: &str, spelling: Spelling) -> Result<WriteReport> {
    let plain = dir.join("plain");
    layers_at(&plain, paths);
    let scheme = match spelling {
        Spelling::Fp8Blocks => Scheme::Block128,
        _ => Scheme::ChannelToken,
    };
    let options = QuantizeOptions::new(scheme)
        .with_spelling(spelling)
        .with_ignore([ignored]);
    let out = dir.join("out");
    rewrite::quantize(&open(&plain), out, &options, &mut rewrite::quiet)
}

/// transformers matches an entry at the end of a path and at its beginning, and before 5.21 wherever the match ends.
#[test]
fn blocks_refuse_a_list_that_names_an_fp8_layer_too() {
    for (ignored, fp8) in [
        ("model.fc1", "model.fc10"),
        ("model.0.mlp.gate", "model.0.mlp.gate_up"),
        // A dot of the entry is any character.
        ("model.a.b", "model.a_b"),
        ("proj", "model.proj"),
        ("fc", "model.other_fc"),
    ] {
        let dir = dir();
        let paths = [ignored, fp8, "model.first"];
        let error = quantize(dir.path(), &paths, ignored, Spelling::Fp8Blocks).unwrap_err();
        let is_typed = matches!(&error, Error::Inexpressible { layer, spelling: Spelling::Fp8Blocks, .. } if layer == fp8);
        assert!(is_typed, "{error}");
        let text = error.to_string();
        assert!(text.contains(&format!("`{ignored}`")), "{text}");
        assert_eq!(names_in(dir.path()), ["plain"]);
    }
    for (ignored, fp8) in [
        ("model.fc10", "model.fc1"),
        ("model.1.fc", "model.10.fc"),
        ("fc.down", "model.fc.down_proj"),
    ] {
        let dir = dir();
        let report = quantize(dir.path(), &[ignored, fp8], ignored, Spelling::Fp8Blocks);
        assert_eq!(report.unwrap().quantized, [fp8]);
    }
}

/// vLLM leaves out layers of ModelOpt's files whose path has that of an excluded one in it. Other engines compare whole paths.
#[test]
fn layers_that_vllm_leaves_out_of_files_of_modelopt_are_reported() {
    let paths = ["model.fc1", "model.fc10", "model.fc2"];
    for (spelling, unread) in [
        (Spelling::ModelOpt, vec!["model.fc10"]),
        (Spelling::CompressedTensors, vec![]),
    ] {
        let dir = dir();
        let report = quantize(dir.path(), &paths, paths[0], spelling).unwrap();
        assert_eq!(report.quantized, paths[1..], "{spelling}");
        assert_eq!(report.unread_by_vllm, unread, "{spelling}");
    }
}

/// transformers reads such a head, vLLM does not.
#[test]
fn an_fp8_head_in_blocks_is_reported() {
    for (spelling, head, unread) in [
        (Spelling::Fp8Blocks, true, vec!["lm_head"]),
        (Spelling::Fp8Blocks, false, vec![]),
        (Spelling::CompressedTensors, true, vec![]),
    ] {
        let dir = dir();
        let [plain, out] = ["plain", "out"].map(|name| dir.path().join(name));
        plain_model(&plain, (128, 256), false, DType::BF16);
        let options = QuantizeOptions::new(Scheme::Block128)
            .with_spelling(spelling)
            .with_head(head);
        let source = open(&plain);
        let report = rewrite::quantize(&source, &out, &options, &mut rewrite::quiet).unwrap();
        let is_quantized = report.quantized.contains(&"lm_head".to_string());
        assert_eq!(is_quantized, head, "{spelling}");
        assert_eq!(report.unread_by_vllm, unread, "{spelling}");
    }
}
