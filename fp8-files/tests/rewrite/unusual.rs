//! Names that look like something else: parameters that are called as scales of caches, linear layers that are called as tables.

use crate::helpers::*;
use candle_core::{DType, Tensor};
use fp8_files::rewrite::{self, QuantizeOptions, Scheme, WriteOptions};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

/// [`plain_model`] with more tensors.
fn model_with(dir: &Path, more: &[(&str, &[usize])]) {
    plain_model(dir, (64, 128), false, DType::BF16);
    let file = dir.join("model.safetensors");
    let mut tensors: HashMap<String, Tensor> = candle_core::safetensors::load(&file, &CPU).unwrap();
    for (seed, (name, dims)) in (100..).zip(more) {
        let value = tensor(seed, dims).to_dtype(DType::BF16).unwrap();
        tensors.insert(name.to_string(), value);
    }
    candle_core::safetensors::save(&tensors, &file).unwrap();
}

/// `k_scale` and `v_scale` of a module that is no attention are parameters as all others: they stay what they are.
#[test]
fn scales_of_other_modules_are_kept() {
    let dir = dir();
    let names = ["model.layers.0.ssm.k_scale", "model.layers.1.ssm.v_scale"];
    model_with(
        &dir.path().join("plain"),
        &names.map(|name| (name, &[3usize][..])),
    );
    let source = open(dir.path().join("plain"));
    let bits_of = |checkpoint: &_, name: &str| others(checkpoint)[name].clone();
    let (fp8, back) = (dir.path().join("fp8"), dir.path().join("back"));
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    rewrite::quantize(&source, &fp8, &options, &mut rewrite::quiet).unwrap();
    let config = json_file(fp8.join("config.json"));
    assert!(config["quantization_config"]["kv_cache_scheme"].is_null());
    let write = WriteOptions::new();
    rewrite::dequantize(&open(&fp8), &back, None, &write, &mut rewrite::quiet).unwrap();
    for folder in [fp8, back] {
        for name in names {
            let (got, expected) = (bits_of(&open(&folder), name), bits_of(&source, name));
            assert_eq!(got, expected, "{name} in {}", folder.display());
        }
    }
}

/// Engines that quantize every `Linear` learn of all that stay in high precision, also of those that are called as embeddings are.
#[test]
fn linear_layers_that_are_called_as_tables_are_ignored() {
    let dir = dir();
    let unknown = [
        "electra.embeddings_project",
        "model.embed_vision.embedding_projection",
    ];
    let tables = ["model.embed_positions", "model.token_type_embeddings"];
    let weights = [unknown, tables].concat();
    let weights: Vec<String> = weights
        .iter()
        .map(|path| format!("{path}.weight"))
        .collect();
    let more: Vec<(&str, &[usize])> = weights
        .iter()
        .map(|name| (name.as_str(), &[32usize, 64][..]))
        .collect();
    model_with(&dir.path().join("plain"), &more);
    let source = open(dir.path().join("plain"));
    let to = dir.path().join("fp8");
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let report = rewrite::quantize(&source, &to, &options, &mut rewrite::quiet).unwrap();
    let config = fs::read_to_string(to.join("config.json")).unwrap();
    for path in unknown {
        assert!(report.ignored.contains(&path.to_string()), "{path}");
        assert!(config.contains(&format!("\"{path}\"")), "{path}");
        assert!(!report.quantized.contains(&path.to_string()), "{path}");
    }
    for path in tables {
        assert!(!report.ignored.contains(&path.to_string()), "{path}");
    }
}
