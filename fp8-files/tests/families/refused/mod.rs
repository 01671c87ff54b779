//! Checkpoints that are damaged, contradict themselves or belong to another format. Each is rejected with an error that names the
//! cause; no value is guessed.

mod descriptions;
mod formats;
mod scales;
mod shapes;

use crate::support::*;
use candle_core::{DType, Device};
use fp8_files::Error;
use fp8_files::load::Checkpoint;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::HashMap;

const N: usize = 6;
const K: usize = 256;

/// The first error of opening the model and reading everything in it.
fn error_of(checkpoint: Result<Checkpoint, Error>) -> Option<Error> {
    let checkpoint = match checkpoint {
        Ok(checkpoint) => checkpoint,
        Err(error) => return Some(error),
    };
    for path in checkpoint.layer_paths() {
        if let Err(error) = checkpoint.stored_layer(&path, &Device::Cpu) {
            return Some(error);
        }
    }
    let names = checkpoint.other_names();
    let mut errors = names
        .iter()
        .map(|name| checkpoint.tensor(name, &Device::Cpu).err());
    errors.find_map(|error| error)
}

fn quantized(config: Value) -> Option<Value> {
    Some(json!({"quantization_config": config}))
}

fn autofp8() -> Option<Value> {
    quantized(
        json!({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}),
    )
}

fn autofp8_static() -> Option<Value> {
    quantized(json!({"quant_method": "fp8", "activation_scheme": "static"}))
}

fn blocks(more: Value) -> Option<Value> {
    let mut config = json!({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]});
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    quantized(config)
}

fn modelopt(algo: Value) -> Option<Value> {
    quantized(
        json!({"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head", "model.layers.0*"]}),
    )
}

fn compressed(more: Value) -> Option<Value> {
    let args = json!({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": false});
    let mut config = json!({"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"g": {"targets": ["Linear"], "weights": args, "input_activations": null}}});
    for (key, value) in more.as_object().unwrap() {
        config[key] = value.clone();
    }
    quantized(config)
}

fn fc() -> Entry {
    weight("fc.weight", N, K)
}

fn one() -> Entry {
    floats("fc.weight_scale", &[], &[0.02])
}

fn input(value: f32) -> Entry {
    floats("fc.input_scale", &[], &[value])
}

fn plain(name: &str) -> Entry {
    floats(name, &[2, 2], &[1., 2., 3., 4.])
}

fn inverse(shape: &[usize]) -> Entry {
    floats(
        "fc.weight_scale_inv",
        shape,
        &scales(shape.iter().product()),
    )
}

struct Case {
    name: &'static str,
    config: Option<Value>,
    tensors: Vec<Entry>,
    metadata: Option<HashMap<String, String>>,
    parts: &'static [&'static str],
}

fn case(
    name: &'static str,
    config: Option<Value>,
    tensors: Vec<Entry>,
    parts: &'static [&'static str],
) -> Case {
    Case {
        name,
        config,
        tensors,
        metadata: None,
        parts,
    }
}

fn run(cases: Vec<Case>) {
    for case in cases {
        let model = Model::with(case.config, &case.tensors, case.metadata);
        let name = case.name;
        let error = error_of(model.open()).unwrap_or_else(|| panic!("{name}: opened"));
        assert!(
            !matches!(error, Error::Candle(_) | Error::Fp8(_)),
            "{name}: {error:?}"
        );
        let text = error.to_string();
        for part in case.parts {
            assert!(text.contains(part), "{name}: {text:?} lacks {part:?}");
        }
        // The error names the file or configuration.
        let places = ["model.safetensors", "config.json"];
        assert!(
            places.iter().any(|place| text.contains(place)),
            "{name}: {text:?} names no file"
        );
    }
}
