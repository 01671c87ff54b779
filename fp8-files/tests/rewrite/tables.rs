//! FP8 weights that are no linear layers: tables of embeddings and routers, which some libraries quantize too. The families that are
//! written here have them in high precision.

use crate::helpers::*;
use candle_core::DType;
use fp8_files::Result;
use fp8_files::load::Checkpoint;
use fp8_files::rewrite::{self, QuantizeOptions, Scheme, Source, Spelling};
use fp8_files::rewrite::{WriteOptions, WriteReport};
use fp8_test_support::files;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::Path;

const TABLE: &str = "model.embed_tokens";
const ROUTER: &str = "model.layers.0.mlp.gate";
const LAYER: &str = "model.layers.0.mlp.up_proj";
const HEAD: &str = "lm_head";

/// Rows of each FP8 weight, and the columns of all.
const WEIGHTS: [(&str, usize); 4] = [(TABLE, 40), (ROUTER, 4), (LAYER, 96), (HEAD, 40)];
const K: usize = 64;

/// Name, dtype, shape and bytes of a tensor.
type Stored = (String, Dtype, Vec<usize>, Vec<u8>);

/// Writes a model of these tensors and a norm in bf16.
fn write(
    dir: &Path,
    mut tensors: Vec<Stored>,
    metadata: Option<HashMap<String, String>>,
    more: Value,
) {
    fs::create_dir(dir).unwrap();
    let ones = [0x80u8, 0x3F].repeat(K);
    tensors.push(("model.norm.weight".into(), Dtype::BF16, vec![K], ones));
    let entries: Vec<files::Entry<'_>> = tensors
        .iter()
        .map(|(name, dtype, dims, bytes)| {
            (name.as_str(), *dtype, dims.as_slice(), bytes.as_slice())
        })
        .collect();
    files::write_with(&dir.join("model.safetensors"), &entries, metadata);
    let mut config = json!({ "architectures": ["LlamaForCausalLM"], "model_type": "llama" });
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    files::write_config(dir, &config);
}

/// A model of MLX, which quantizes tables as it does linear layers.
fn mlx(dir: &Path, weights: &[(&str, usize)]) {
    let mut tensors = vec![];
    for (path, rows) in weights {
        let (codes, groups) = (files::codes(rows * K), rows * K / 32);
        let scales = (0..groups).map(|i| 118 + (i % 5) as u8).collect();
        let words = vec![*rows, K / 4];
        tensors.push((format!("{path}.weight"), Dtype::U32, words, codes));
        let dims = vec![*rows, K / 32];
        tensors.push((format!("{path}.scales"), Dtype::U8, dims, scales));
    }
    let quantization = json!({ "group_size": 32, "bits": 8, "mode": "mxfp8" });
    let more = json!({ "quantization": quantization.clone(), "quantization_config": quantization });
    write(dir, tensors, None, more);
}

/// A model of torchao with embeddings among the quantized modules.
fn torchao(dir: &Path) {
    let row = json!({ "_type": "PerRow", "_data": { "dim": -1 } });
    let per_token =
        json!({ "_type": "QuantizeTensorToFloat8Kwargs", "_data": { "granularity": row } });
    let (mut tensors, mut metadata) = (vec![], HashMap::new());
    for (path, rows) in WEIGHTS {
        let inputs = match path {
            TABLE => Value::Null,
            _ => per_token.clone(),
        };
        let data = json!({ "block_size": [1, K], "act_quant_kwargs": inputs });
        let described = json!({ "_type": "Float8Tensor", "_data": data });
        metadata.insert(format!("{path}.weight"), described.to_string());
        let (codes, dims) = (files::codes(rows * K), vec![rows, K]);
        tensors.push((format!("{path}._weight_qdata"), Dtype::F8_E4M3, dims, codes));
        let numbers: Vec<f32> = (0..rows).map(|i| 0.001 * (i + 1) as f32).collect();
        let (scales, dims) = (files::f32s(&numbers), vec![rows, 1]);
        tensors.push((format!("{path}._weight_scale"), Dtype::F32, dims, scales));
    }
    let names: Vec<String> = WEIGHTS
        .iter()
        .map(|(path, _)| format!("{path}.weight"))
        .collect();
    metadata.insert("tensor_names".into(), json!(names).to_string());
    let more = json!({ "quantization_config": { "quant_method": "torchao" } });
    write(dir, tensors, Some(metadata), more);
}

fn convert(from: &Path, to: &Path, spelling: Spelling) -> Result<WriteReport> {
    let options = WriteOptions::new();
    rewrite::convert(&open(from), to, spelling, &options, &mut rewrite::quiet)
}

/// Checks that layer and head are as in the source, and table and router in high precision.
fn check(from: &Path, to: &Path, report: &WriteReport) {
    assert_eq!(report.quantized, [HEAD, LAYER]);
    assert_eq!(report.dequantized, [TABLE, ROUTER]);
    assert_eq!(report.ignored, [ROUTER]);
    let (source, again) = (open(from), open(to));
    assert_eq!(again.layer_paths(), [HEAD, LAYER]);
    for path in [HEAD, LAYER] {
        let layer = |checkpoint: &Checkpoint| facts(&checkpoint.stored_layer(path, &CPU).unwrap());
        assert!(layer(&source) == layer(&again), "{path}");
    }
    let all = others(&again);
    for path in [TABLE, ROUTER] {
        let name = format!("{path}.weight");
        let expected = Source::value(&source, &name, DType::BF16).unwrap();
        let (dtype, dims, got) = &all[&name];
        assert_eq!(dtype, "bf16", "{path}");
        assert_eq!(dims.as_slice(), expected.dims(), "{path}");
        assert_eq!(*got, bits(&expected), "{path}");
    }
}

#[test]
fn tables_and_routers_of_mlx_are_dequantized() {
    let dir = dir();
    let [from, to] = ["mlx", "out"].map(|name| dir.path().join(name));
    mlx(&from, &WEIGHTS);
    let report = convert(&from, &to, Spelling::CompressedTensors).unwrap();
    check(&from, &to, &report);
    let config = json_file(to.join("config.json"));
    assert!(config.get("quantization").is_none());
    let group = &config["quantization_config"]["config_groups"]["group_0"];
    assert_eq!(group["targets"], json!(["Linear", HEAD]));
}

#[test]
fn tables_and_routers_of_torchao_are_dequantized_in_every_spelling() {
    for spelling in [Spelling::CompressedTensors, Spelling::ModelOpt] {
        let dir = dir();
        let [from, to] = ["torchao", "out"].map(|name| dir.path().join(name));
        torchao(&from);
        let report = convert(&from, &to, spelling).unwrap();
        check(&from, &to, &report);
    }
}

/// A linear layer may have a name that tells of embeddings or norms.
#[test]
fn layers_whose_names_do_not_tell_keep_their_codes() {
    const UNKNOWN: &str = "model.embeddings_project";
    let dir = dir();
    let [from, to] = ["mlx", "out"].map(|name| dir.path().join(name));
    mlx(&from, &[(UNKNOWN, 40), WEIGHTS[0], WEIGHTS[2]]);
    let report = convert(&from, &to, Spelling::CompressedTensors).unwrap();
    assert_eq!(report.quantized, [UNKNOWN, LAYER]);
    assert_eq!(report.dequantized, [TABLE]);
    let layer = |dir: &Path| facts(&open(dir).stored_layer(UNKNOWN, &CPU).unwrap());
    assert!(layer(&from) == layer(&to));
}

#[test]
fn a_model_with_an_fp8_table_alone_has_nothing_to_convert() {
    let dir = dir();
    let [from, to] = ["mlx", "out"].map(|name| dir.path().join(name));
    mlx(&from, &WEIGHTS[..1]);
    let error = convert(&from, &to, Spelling::CompressedTensors).unwrap_err();
    assert!(
        matches!(error, fp8_files::Error::NothingToConvert),
        "{error}"
    );
    assert!(!to.exists());
}

/// The report of every rewrite names what is no longer FP8.
#[test]
fn other_rewrites_report_them_too() {
    let dir = dir();
    let [from, fp8, plain] = ["mlx", "fp8", "plain"].map(|name| dir.path().join(name));
    mlx(&from, &WEIGHTS);
    let options = QuantizeOptions::new(Scheme::Mxfp8).with_ignore([HEAD]);
    let report = rewrite::quantize(&open(&from), &fp8, &options, &mut rewrite::quiet).unwrap();
    assert_eq!(report.quantized, [LAYER]);
    assert_eq!(report.dequantized, [HEAD, TABLE, ROUTER]);
    let write = WriteOptions::new();
    let source = open(&from);
    let report = rewrite::dequantize(&source, &plain, None, &write, &mut rewrite::quiet).unwrap();
    assert_eq!(report.dequantized, [HEAD, TABLE, ROUTER, LAYER]);
}
