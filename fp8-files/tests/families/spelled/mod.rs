//! Families without golden files: models written here by their descriptions, with values from formulas.

mod blocks;
mod experts;
mod exponents;
mod layers;
mod modelopt;
mod names;
mod places;
mod single_files;
mod tables;

use crate::support::*;
use candle_core::{DType, Device, Module, Tensor};
use fp8_files::load::{Checkpoint, FamilyName, OpenOptions};
use fp8_recipes::nn;
use half::{bf16, f16};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;

const N: usize = 6;
const K: usize = 256;
const CPU: Device = Device::Cpu;

fn quantized(config: Value) -> Option<Value> {
    Some(json!({"model_type": "llama", "quantization_config": config}))
}

fn bf16s(name: &str, shape: &[usize], values: &[f32]) -> Entry {
    let data = values.iter().flat_map(|x| bf16::from_f32(*x).to_le_bytes());
    entry(name, Dtype::BF16, shape, data.collect())
}

/// Exponents of powers of two, and their values.
fn powers(len: usize) -> (Vec<u8>, Vec<f32>) {
    let bytes: Vec<u8> = (0..len).map(|i| 110 + (i * 7 % 13) as u8).collect();
    let values = bytes.iter().map(|byte| 2f32.powi(i32::from(*byte) - 127));
    (bytes.clone(), values.collect())
}

/// Checks family, inputs and values of a layer.
fn check(
    case: &str,
    checkpoint: &Checkpoint,
    path: &str,
    family: FamilyName,
    input: &str,
    values: &[f32],
) {
    assert_eq!(checkpoint.family(), family, "{case}");
    assert!(
        checkpoint.layer_paths().contains(&path.to_string()),
        "{case}"
    );
    let layer = checkpoint
        .stored_layer(path, &CPU)
        .unwrap_or_else(|error| panic!("{case}: {error}"));
    let text = format!("{:?}", layer.input);
    assert!(text.starts_with(input), "{case}: {text}");
    assert_eq!(value(checkpoint, path), values, "{case}");
}

fn opened(case: &str, model: &Model) -> Checkpoint {
    model
        .open()
        .unwrap_or_else(|error| panic!("{case}: {error}"))
}

const TOKEN: &str = "DynamicPerToken { power_of_two: false, amax_bound: None }";
