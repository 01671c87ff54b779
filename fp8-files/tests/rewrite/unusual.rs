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

/// Those of a layer lie in one tensor, which is no matrix: engines learn that they are in high precision.
#[test]
fn experts_in_one_tensor_are_ignored_by_name() {
    let dir = dir();
    let names =
        ["gate_up_proj", "down_proj"].map(|name| format!("model.layers.0.mlp.experts.{name}"));
    let more = [(&*names[0], &[2usize, 8, 4][..]), (&*names[1], &[2, 4, 8])];
    model_with(&dir.path().join("plain"), &more);
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let (from, to) = (open(dir.path().join("plain")), dir.path().join("fp8"));
    let report = rewrite::quantize(&from, &to, &options, &mut rewrite::quiet).unwrap();
    let experts = report
        .ignored
        .iter()
        .filter(|path| path.contains("experts"));
    assert_eq!(experts.collect::<Vec<_>>(), ["model.layers.0.mlp.experts"]);
    let config = json_file(to.join("config.json"));
    let listed = config["quantization_config"]["ignore"].as_array().unwrap();
    assert!(
        listed
            .iter()
            .any(|path| path == "model.layers.0.mlp.experts")
    );
}

/// Their weights have a row for each input, and FP8 files a scale for each output.
#[test]
fn transposed_weights_are_refused() {
    let dir = dir();
    let from = dir.path().join("plain");
    plain_model(&from, (64, 128), false, DType::BF16);
    let mut config = json_file(from.join("config.json"));
    config["model_type"] = "gpt2".into();
    fs::write(from.join("config.json"), config.to_string()).unwrap();
    let options = QuantizeOptions::new(Scheme::ChannelToken);
    let to = dir.path().join("fp8");
    let error = rewrite::quantize(&open(&from), &to, &options, &mut rewrite::quiet).unwrap_err();
    assert!(error.to_string().contains("`gpt2`"), "{error}");
    assert!(!to.exists());
}

/// bf16 holds larger numbers than f16.
#[test]
fn numbers_beyond_f16_are_named() {
    let dir = dir();
    let from = dir.path().join("plain");
    model_with(&from, &[("model.large.weight", &[40])]);
    let file = from.join("model.safetensors");
    let mut tensors: HashMap<String, Tensor> = candle_core::safetensors::load(&file, &CPU).unwrap();
    let mut values = vec![1f32; 40];
    values[37] = -70000.;
    let large = Tensor::new(values, &CPU).unwrap().to_dtype(DType::BF16);
    tensors.insert("model.large.weight".into(), large.unwrap());
    candle_core::safetensors::save(&tensors, &file).unwrap();
    let (write, to) = (WriteOptions::new(), dir.path().join("f16"));
    let dequantize =
        |dtype| rewrite::dequantize(&open(&from), &to, dtype, &write, &mut rewrite::quiet);
    let error = dequantize(DType::F16).unwrap_err().to_string();
    for part in ["model.large.weight", "37", "-7.0144e4", "the range of f16"] {
        assert!(error.contains(part), "{error}");
    }
    assert!(!to.exists());
    dequantize(DType::F32).unwrap();
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
