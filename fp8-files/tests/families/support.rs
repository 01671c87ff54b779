//! Directories with small models whose values come from formulas.

use candle_core::{DType, Device};
use fp8_files::load::{Checkpoint, OpenOptions};
pub use fp8_test_support::bits;
use safetensors::Dtype;
use safetensors::tensor::{SafeTensors, TensorView};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A tensor of a file.
#[derive(Debug, Clone)]
pub struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Vec<u8>,
}

pub fn entry(name: &str, dtype: Dtype, shape: &[usize], data: Vec<u8>) -> Entry {
    Entry {
        name: name.into(),
        dtype,
        shape: shape.to_vec(),
        data,
    }
}

/// An F32 tensor.
pub fn floats(name: &str, shape: &[usize], values: &[f32]) -> Entry {
    let data = values.iter().flat_map(|x| x.to_le_bytes()).collect();
    entry(name, Dtype::F32, shape, data)
}

/// An FP8 weight with [`codes`].
pub fn weight(name: &str, n: usize, k: usize) -> Entry {
    entry(name, Dtype::F8_E4M3, &[n, k], codes(n * k))
}

/// Finite codes of both signs and all magnitudes.
pub fn codes(len: usize) -> Vec<u8> {
    let code = |i: usize| (i * 37 % 127) as u8 | if i.is_multiple_of(3) { 0x80 } else { 0 };
    (0..len).map(code).collect()
}

/// Scales that all differ.
pub fn scales(len: usize) -> Vec<f32> {
    (1..=len).map(|i| i as f32 * 0.003).collect()
}

/// The value of an E4M3 code, by its definition.
pub fn decode(code: u8) -> f32 {
    let sign = if code & 0x80 == 0 { 1. } else { -1. };
    let exponent = i32::from(code >> 3 & 0xF);
    let fraction = f32::from(code & 7) / 8.;
    sign * match exponent {
        0 => fraction * 2f32.powi(-6),
        e => (1. + fraction) * 2f32.powi(e - 7),
    }
}

/// The values of [`weight`], with the scale of each element.
pub fn expected(n: usize, k: usize, scale: impl Fn(usize, usize) -> f32) -> Vec<f32> {
    let codes = codes(n * k);
    let value = |at: usize| decode(codes[at]) * scale(at / k, at % k);
    (0..n * k).map(value).collect()
}

/// A directory with a model.
pub struct Model {
    pub dir: TempDir,
}

impl Model {
    pub fn new(config: Option<Value>, tensors: &[Entry]) -> Self {
        Self::with(config, tensors, None)
    }

    pub fn with(
        config: Option<Value>,
        tensors: &[Entry],
        metadata: Option<HashMap<String, String>>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        if let Some(config) = config {
            fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
        }
        write(&dir.path().join("model.safetensors"), tensors, metadata);
        Self { dir }
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn file(&self, name: &str, text: &str) -> &Self {
        fs::write(self.dir.path().join(name), text).unwrap();
        self
    }

    pub fn open(&self) -> fp8_files::Result<Checkpoint> {
        Checkpoint::open_dir(self.dir.path())
    }

    pub fn open_with(&self, options: OpenOptions) -> fp8_files::Result<Checkpoint> {
        Checkpoint::open_dir_with(self.dir.path(), &options)
    }
}

pub fn write(path: &Path, tensors: &[Entry], metadata: Option<HashMap<String, String>>) {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.data).unwrap();
        (tensor.name.as_str(), view)
    });
    fs::write(path, safetensors::serialize(views, metadata).unwrap()).unwrap();
}

/// All tensors of a file, and its metadata.
pub fn read(path: &Path) -> (Vec<Entry>, HashMap<String, String>) {
    let bytes = fs::read(path).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors: Vec<Entry> = file
        .iter()
        .map(|(name, view)| entry(name, view.dtype(), view.shape(), view.data().to_vec()))
        .collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    (tensors, metadata.metadata().clone().unwrap_or_default())
}

/// Writes the tensors into two files with an index: scales into the second, all others into the first.
pub fn split(dir: &Path, tensors: &[Entry], metadata: HashMap<String, String>, name: &str) {
    let stem = name.strip_suffix(".safetensors").unwrap();
    let files = [1, 2].map(|i| format!("{stem}-0000{i}-of-00002.safetensors"));
    let is_scale = |name: &str| name.contains("scale");
    let (scales, weights): (Vec<Entry>, Vec<Entry>) = tensors
        .iter()
        .cloned()
        .partition(|tensor| is_scale(&tensor.name));
    write(&dir.join(&files[0]), &weights, Some(metadata.clone()));
    write(&dir.join(&files[1]), &scales, Some(metadata));
    let map: serde_json::Map<String, Value> = tensors
        .iter()
        .map(|tensor| {
            (
                tensor.name.clone(),
                json!(files[usize::from(is_scale(&tensor.name))]),
            )
        })
        .collect();
    let index = json!({"metadata": {"total_size": 0}, "weight_map": map});
    fs::write(dir.join(format!("{name}.index.json")), index.to_string()).unwrap();
}

pub fn golden(name: &str) -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/golden/families");
    tests.join(name)
}

/// The dequantized value of a layer.
pub fn value(checkpoint: &Checkpoint, path: &str) -> Vec<f32> {
    let layer = checkpoint.stored_layer(path, &Device::Cpu).unwrap();
    let value = layer.codes.dequantize(DType::F32).unwrap();
    value.flatten_all().unwrap().to_vec1().unwrap()
}
