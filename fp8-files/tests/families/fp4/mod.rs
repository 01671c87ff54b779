//! Weights in MXFP4 and NVFP4.

mod damaged;
mod rewritten;
mod values;

use crate::support::*;
use candle_core::{DType, Device};
use fp8_core::{Format, Granularity};
use fp8_files::Error;
use fp8_files::load::{Checkpoint, FamilyName};
use fp8_files::rewrite::{self, Scheme, Spelling, WriteOptions};
use fp8_recipes::nn::{self, InputScaling};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The value of an E2M1 code, by the table of the OCP specification.
fn e2m1(code: u8) -> f64 {
    let magnitude = [0., 0.5, 1., 1.5, 2., 3., 4., 6.][usize::from(code & 7)];
    if code & 8 == 0 { magnitude } else { -magnitude }
}

fn compressed(group: Value, format: &str) -> Option<Value> {
    let group = json!({"targets": ["Linear"], "weights": group, "input_activations": null});
    Some(
        json!({"quantization_config": {"quant_method": "compressed-tensors", "format": format,
        "config_groups": {"g": group}, "ignore": []}}),
    )
}

fn mxfp4() -> Option<Value> {
    let args = json!({"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"});
    compressed(args, "mxfp4-pack-quantized")
}

fn nvfp4() -> Option<Value> {
    let args = json!({"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16,
        "scale_dtype": "torch.float8_e4m3fn"});
    compressed(args, "nvfp4-pack-quantized")
}

fn modelopt(algo: &str) -> Option<Value> {
    Some(json!({"quantization_config": {"quant_method": "modelopt", "quant_algo": algo}}))
}

/// Bytes of a row that has every code: pair `i` is code `2i % 16` in the low half and the next one in the high half.
fn all_codes(pairs: usize) -> Vec<u8> {
    let pair = |i: usize| ((2 * i % 16) | ((2 * i + 1) % 16) << 4) as u8;
    (0..pairs).map(pair).collect()
}

/// Bits, in which -0 differs from 0.
fn values(checkpoint: &Checkpoint, path: &str) -> Vec<u32> {
    let values = value(checkpoint, path).into_iter();
    values.map(f32::to_bits).collect()
}

fn folder(name: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    root.join("../tests/golden/fp4").join(name)
}
