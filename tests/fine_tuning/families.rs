//! A file of every family of FP8 checkpoints, and its values.

use crate::support::device;
use candle_core::DType;
use candle_nn::{Init, VarMap};
use fp8_core::{E8M0, Format};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Name, dtype, shape and bytes of a tensor.
pub type Entry = (&'static str, Dtype, Vec<usize>, Vec<u8>);

pub fn write(path: &Path, tensors: &[Entry], metadata: Option<HashMap<String, String>>) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (*name, TensorView::new(*dtype, shape.clone(), data).unwrap())
    });
    fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
}

pub fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Finite codes of both signs.
pub fn codes(len: usize) -> Vec<u8> {
    let code = |i: usize| (i * 37 % 127) as u8 | if i.is_multiple_of(3) { 0x80 } else { 0 };
    (0..len).map(code).collect()
}

pub const N: usize = 6;
pub const K: usize = 256;

pub fn compressed(format: &str, weights: Value) -> Value {
    let mut args = json!({"num_bits": 8, "type": "float", "symmetric": true, "dynamic": false});
    for (key, value) in weights.as_object().unwrap() {
        args[key] = value.clone();
    }
    json!({"quantization_config": {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"FP8": {"targets": ["Linear"], "weights": args, "input_activations": null}},
        "ignore": []}})
}

/// A file of one FP8 layer `fc` and a table `embed`, and the values of `fc.weight`.
pub struct Family {
    pub name: &'static str,
    config: Option<Value>,
    pub scale: Entry,
    /// Index of the scale of an element.
    scale_at: fn(usize, usize) -> usize,
    scales: Vec<f32>,
    input_scale: Option<&'static str>,
}

pub fn families() -> Vec<Family> {
    let scales = |len: usize| (1..=len).map(|i| i as f32 * 0.003).collect::<Vec<_>>();
    let floats = |name, shape: &[usize]| {
        let values = scales(shape.iter().product());
        ((name, Dtype::F32, shape.to_vec(), f32s(&values)), values)
    };
    let mut all = vec![];
    let mut add = |name, config, (scale, scales), scale_at, input_scale| {
        all.push(Family {
            name,
            config,
            scale,
            scale_at,
            scales,
            input_scale,
        });
    };
    type At = fn(usize, usize) -> usize;
    let (tensor, row): (At, At) = (|_, _| 0, |row, _| row);
    let weight_scale = "fc.weight_scale";
    add(
        "no configuration",
        None,
        floats(weight_scale, &[1]),
        tensor,
        Some("fc.input_scale"),
    );
    add(
        "no configuration, rows",
        None,
        floats(weight_scale, &[N, 1]),
        row,
        None,
    );
    let channel = compressed("float-quantized", json!({"strategy": "channel"}));
    add(
        "compressed-tensors, rows",
        Some(channel),
        floats(weight_scale, &[N, 1]),
        row,
        None,
    );
    let blocks = json!({"strategy": "block", "block_structure": [128, 128]});
    let blocks = compressed("float-quantized", blocks);
    add(
        "compressed-tensors, blocks",
        Some(blocks),
        floats(weight_scale, &[1, 2]),
        |_, col| col / 128,
        None,
    );
    let vllm =
        json!({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}});
    add(
        "fp8, one scale",
        Some(vllm),
        floats(weight_scale, &[1]),
        tensor,
        Some("fc.input_scale"),
    );
    let deepseek = json!({"quantization_config": {"quant_method": "fp8", "fmt": "e4m3",
        "activation_scheme": "dynamic", "weight_block_size": [4, 128]}});
    add(
        "fp8, blocks",
        Some(deepseek),
        floats("fc.weight_scale_inv", &[2, 2]),
        |row, col| row / 4 * 2 + col / 128,
        None,
    );
    let powers: Vec<u8> = (0..N * 8).map(|i| 120 + i as u8 % 9).collect();
    let values = powers
        .iter()
        .map(|bits| E8M0::from_bits(*bits).to_f32())
        .collect();
    let mx = compressed(
        "mxfp8-quantized",
        json!({"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    );
    add(
        "MX",
        Some(mx),
        ((weight_scale, Dtype::U8, vec![N, 8], powers), values),
        |row, col| row * 8 + col / 32,
        None,
    );
    all
}

impl Family {
    pub fn write(&self, dir: &Path) -> PathBuf {
        let mut tensors = vec![
            ("fc.weight", Dtype::F8_E4M3, vec![N, K], codes(N * K)),
            self.scale.clone(),
            (
                "embed.weight",
                Dtype::F32,
                vec![3, 2],
                f32s(&[0.1, -2., 3., 1e-5, 0., 7.]),
            ),
        ];
        tensors.extend(
            self.input_scale
                .map(|name| (name, Dtype::F32, vec![1], f32s(&[0.5]))),
        );
        let path = dir.join("model.safetensors");
        write(&path, &tensors, None);
        if let Some(config) = &self.config {
            fs::write(dir.join("config.json"), config.to_string()).unwrap();
        }
        path
    }

    pub fn weight(&self) -> Vec<f32> {
        let codes = codes(N * K);
        let value = |i: usize| {
            let scale = self.scales[(self.scale_at)(i / K, i % K)];
            Format::E4M3.decode(codes[i]) * scale
        };
        (0..N * K).map(value).collect()
    }
}

/// Variables of zeros.
pub fn zeros(dtype: DType, all: &[(&str, &[usize])]) -> VarMap {
    let vars = VarMap::new();
    for (name, dims) in all {
        vars.get(*dims, name, Init::Const(0.), dtype, &device())
            .unwrap();
    }
    vars
}

pub const LAYER: [(&str, &[usize]); 2] = [("fc.weight", &[N, K]), ("embed.weight", &[3, 2])];
