//! Hand-made checkpoints.

use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde_json::Value;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Name, dtype, shape and bytes of a tensor.
pub type Entry<'a> = (&'a str, Dtype, &'a [usize], &'a [u8]);

/// A safetensors file of these tensors.
pub fn write(path: &Path, tensors: &[Entry<'_>]) {
    write_with(path, tensors, None);
}

/// The same with metadata.
pub fn write_with(path: &Path, tensors: &[Entry<'_>], metadata: Option<HashMap<String, String>>) {
    let views = tensors.iter().map(|(name, dtype, shape, data)| {
        (
            *name,
            TensorView::new(*dtype, shape.to_vec(), data).unwrap(),
        )
    });
    fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
}

/// A file of this header and these bytes, whether they fit each other or not.
pub fn raw(path: &Path, header: &str, data: &[u8]) {
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.bytes());
    bytes.extend(data);
    fs::write(path, bytes).unwrap();
}

/// E4M3 codes of both signs and many magnitudes; the second is that of the largest, 448.
pub fn codes(len: usize) -> Vec<u8> {
    let code = |i: usize| match i {
        1 => 0x7E,
        i => (i * 5 % 120) as u8 | if i % 3 == 0 { 0x80 } else { 0 },
    };
    (0..len).map(code).collect()
}

/// The bytes of these numbers.
pub fn f32s(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

/// Puts a `config.json` into a directory.
pub fn write_config(dir: &Path, config: &Value) -> PathBuf {
    let path = dir.join("config.json");
    fs::write(&path, config.to_string()).unwrap();
    path
}

/// Writes a model for examples into `dir`: the FP8 layer `fc` of 64 inputs and 32 outputs, with a scale per output and a bias. Returns
/// the path of the file.
pub fn fp8_model(dir: &Path) -> PathBuf {
    let path = dir.join("model.safetensors");
    let (weight, numbers) = (codes(32 * 64), f32s(&[0.01; 32]));
    let tensors = [
        ("fc.bias", Dtype::F32, &[32][..], &numbers[..]),
        ("fc.weight", Dtype::F8_E4M3, &[32, 64], &weight),
        ("fc.weight_scale", Dtype::F32, &[32, 1], &numbers),
    ];
    write(&path, &tensors);
    path
}

/// Writes the model of [`fp8_model`] in f32. Returns the path of the file.
pub fn plain_model(dir: &Path) -> PathBuf {
    let path = dir.join("model.safetensors");
    let (weight, bias) = (f32s(&[1.; 32 * 64]), f32s(&[0.; 32]));
    let tensors = [
        ("fc.bias", Dtype::F32, &[32][..], &bias[..]),
        ("fc.weight", Dtype::F32, &[32, 64], &weight),
    ];
    write(&path, &tensors);
    path
}
