//! A checkpoint of one layer, and configurations for it.

use crate::device;
use crate::files::{Entry, codes, f32s, write};
use candle_core::DType;
use fp8_recipes::load::var_builder;
use fp8_recipes::nn::{self, Linear};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::Path;

/// Outputs of the layer.
pub const N: usize = 6;
/// Inputs of the layer.
pub const K: usize = 256;

/// Scales that all differ.
pub fn scales(len: usize) -> Vec<f32> {
    (1..=len).map(|i| i as f32 * 0.003).collect()
}

/// Arguments of a cast as compressed-tensors writes them, changed by `more`.
pub fn args(strategy: &str, more: Value) -> Value {
    let mut args = json!({"num_bits": 8, "type": "float", "symmetric": true, "strategy": strategy,
                          "dynamic": false, "group_size": null});
    for (key, value) in more.as_object().unwrap() {
        args[key] = value.clone();
    }
    args
}

/// `config.json` of a compressed-tensors checkpoint with one group.
pub fn compressed(format: &str, weights: Value, inputs: Value) -> Value {
    json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"FP8": {"targets": ["Linear"], "weights": weights,
                                  "input_activations": inputs}},
        "ignore": ["lm_head"]}})
}

/// The layer as it loads from the file in `dir`, or the text of the error.
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
