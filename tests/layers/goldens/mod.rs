//! Linear layers and checkpoints against the results of torchao, flax and compressed-tensors.

mod compressed;
mod flax;
mod torchao;

use candle_core::Tensor;
use fp8_test_support::{device, golden};
use serde_json::Value;
use std::collections::HashMap;

pub type Tensors = HashMap<String, Tensor>;

pub fn load_tensors(name: &str) -> Tensors {
    candle_core::safetensors::load(golden(name), &device()).unwrap()
}

pub fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key]
        .as_str()
        .unwrap_or_else(|| panic!("no {key} in {value}"))
}
