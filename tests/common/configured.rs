//! A checkpoint of one layer, and configurations for it.
#![allow(dead_code)] // each test binary uses its own part

#[path = "files.rs"]
pub mod files;
#[path = "recipes.rs"]
pub mod recipes;

use candle_core::DType;
use files::{Entry, codes, f32s, write};
use fp8::recipes::load::var_builder;
use fp8::recipes::nn::{self, Linear};
use recipes::device;
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;

pub const N: usize = 6;
pub const K: usize = 256;

pub fn scales(len: usize) -> Vec<f32> {
    (1..=len).map(|i| i as f32 * 0.003).collect()
}

pub fn args(strategy: &str, more: Value) -> Value {
    let mut args = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
                          "dynamic": false, "group_size": null});
    for (key, value) in more.as_object().unwrap() {
        args[key] = value.clone();
    }
    args
}

pub fn compressed(format: &str, weights: Value, inputs: Value) -> Value {
    json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"FP8": {"targets": ["Linear"], "weights": weights,
                                  "input_activations": inputs}},
        "ignore": ["lm_head"]}})
}

pub fn layer(dir: &Path) -> Result<Linear, String> {
    let path = dir.join("model.safetensors");
    let vb = var_builder(&[&path], DType::F32, &device()).map_err(|error| error.to_string())?;
    nn::linear_no_bias(K, N, vb.pp("fc")).map_err(|error| error.to_string())
}

/// A file of one layer with these scales.
pub fn file(dir: &Path, weight_scale: &[usize], input_scale: Option<f32>) {
    let scale = f32s(&scales(weight_scale.iter().product()));
    let input = f32s(&[input_scale.unwrap_or(1.)]);
    let codes = codes(N * K);
    let mut tensors: Vec<Entry<'_>> = vec![
        ("fc.weight", Dtype::F8_E4M3, &[N, K], &codes),
        ("fc.weight_scale", Dtype::F32, weight_scale, &scale),
    ];
    if input_scale.is_some() {
        tensors.push(("fc.input_scale", Dtype::F32, &[1], &input));
    }
    write(&dir.join("model.safetensors"), &tensors);
}
