//! Layers of one model with different schemes.

use crate::helpers::*;
use candle_core::{DType, Tensor};
use fp8_files::rewrite::{self, QuantizeOptions, Spelling, WriteOptions};
use serde_json::{Value, json};
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

const SCHEMES: [&str; 4] = [
    "channel-token",
    "mxfp8",
    "static-tensor",
    "weight-only:blockwise:128x128",
];

/// A model whose linear layers have these schemes in turn, in compressed-tensors. Returns the paths of the layers, with the number of the
/// scheme of each.
fn mixed_model(dir: &Path) -> Vec<(String, usize)> {
    let plain = dir.join("plain");
    plain_model(&plain, (128, 256), false, DType::BF16);
    let source = open(&plain);
    let (mut tensors, mut groups) = (HashMap::<String, Tensor>::new(), json!({}));
    let (mut config, mut layers) = (Value::Null, vec![]);
    for (number, scheme) in SCHEMES.into_iter().enumerate() {
        let part = dir.join(format!("part{number}"));
        let linears = ["self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"];
        let paths = (0..2).flat_map(|i| linears.map(|own| format!("model.layers.{i}.{own}")));
        let paths: Vec<String> = paths.collect();
        let amaxes = paths.iter().map(|path| (path.clone(), 3.5)).collect();
        let options = QuantizeOptions::new(scheme.parse().unwrap()).with_input_amaxes(amaxes);
        rewrite::quantize(&source, &part, &options, &mut rewrite::quiet).unwrap();
        let mine = |i: usize| i % SCHEMES.len() == number;
        let of_layer = |name: &str| {
            paths.iter().position(|path| {
                let own = name.strip_prefix(path.as_str());
                own.is_some_and(|own| [".weight", ".weight_scale", ".input_scale"].contains(&own))
            })
        };
        for (name, tensor) in
            candle_core::safetensors::load(part.join("model.safetensors"), &CPU).unwrap()
        {
            if of_layer(&name).is_none_or(mine) {
                tensors.insert(name, tensor);
            }
        }
        config = json_file(part.join("config.json"));
        let mut group = config["quantization_config"]["config_groups"]["group_0"].clone();
        let mine = paths.iter().enumerate().filter(|(i, _)| mine(*i));
        let mine: Vec<&String> = mine.map(|(_, path)| path).collect();
        group["targets"] = json!(mine);
        group["format"] = config["quantization_config"]["format"].clone();
        groups[format!("group_{number}")] = group;
        layers.extend(mine.into_iter().map(|path| (path.clone(), number)));
    }
    config["quantization_config"]["config_groups"] = groups;
    config["quantization_config"]["format"] = json!("mixed-precision");
    let to = dir.join("mixed");
    std::fs::create_dir(&to).unwrap();
    write_tensors(&to, &tensors);
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    layers
}

fn write_tensors(to: &Path, tensors: &HashMap<String, Tensor>) {
    candle_core::safetensors::save(tensors, to.join("model.safetensors")).unwrap();
}

#[test]
fn modelopt_lists_each_layer_with_its_algorithm() {
    let dir = dir();
    let layers = mixed_model(dir.path());
    let source = open(dir.path().join("mixed"));
    let (to, back) = (dir.path().join("modelopt"), dir.path().join("back"));
    let options = WriteOptions::new();
    let report = rewrite::convert(
        &source,
        &to,
        Spelling::ModelOpt,
        &options,
        &mut rewrite::quiet,
    )
    .unwrap();

    let algos = ["FP8_PER_CHANNEL_PER_TOKEN", "MXFP8", "FP8", "fp8_pb_wo"];
    // In a mixture vLLM reads layers in FP8 only.
    let unread = layers.iter().filter(|(_, number)| algos[*number] != "FP8");
    let unread: BTreeSet<&String> = unread.map(|(path, _)| path).collect();
    assert!(!unread.is_empty() && unread.len() < layers.len());
    assert_eq!(
        report.unread_by_vllm.iter().collect::<BTreeSet<_>>(),
        unread
    );
    let first = &json_file(to.join("config.json"))["quantization_config"];
    let second = &json_file(to.join("hf_quant_config.json"))["quantization"];
    for quantization in [first, second] {
        assert_eq!(quantization["quant_algo"], "MIXED_PRECISION");
        let listed = quantization["quantized_layers"].as_object().unwrap();
        assert_eq!(listed.len(), layers.len());
        for (path, number) in &layers {
            assert_eq!(listed[path]["quant_algo"], algos[*number], "{path}");
            let size = (algos[*number] == "MXFP8").then_some(32);
            assert_eq!(
                listed[path].get("group_size"),
                size.map(Value::from).as_ref()
            );
        }
        assert!(quantization.get("group_size").is_none());
    }
    // Read by either file, the model is the same, and converted back it has the same codes and scales.
    let facts = all_facts(&source);
    assert!(all_facts(&open(&to)) == facts && others(&open(&to)) == others(&source));
    let spelling = Spelling::CompressedTensors;
    rewrite::convert(&open(&to), &back, spelling, &options, &mut rewrite::quiet).unwrap();
    assert!(all_facts(&open(&back)) == facts);
    let mut config = json_file(to.join("config.json"));
    config
        .as_object_mut()
        .unwrap()
        .remove("quantization_config");
    std::fs::write(to.join("config.json"), config.to_string()).unwrap();
    assert!(all_facts(&open(&to)) == facts);
}

/// A family with one scheme for all names the first layer that has another.
#[test]
fn other_families_name_the_layer() {
    let dir = dir();
    mixed_model(dir.path());
    let source = open(dir.path().join("mixed"));
    let to = dir.path().join("out");
    for spelling in [Spelling::AutoFp8, Spelling::Fp8Blocks] {
        let result = rewrite::convert(
            &source,
            &to,
            spelling,
            &WriteOptions::new(),
            &mut rewrite::quiet,
        );
        let error = result.unwrap_err().to_string();
        assert!(error.contains("model.layers.0."), "{error}");
    }
}
