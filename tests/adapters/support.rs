//! Models and adapters of the golden data.

use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::load::Checkpoint;
use fp8::models::{AdapterConfig, Model, ModelOptions, open};
use fp8::rewrite::{self, QuantizeOptions, Scheme};
use fp8_test_support::golden;
use fp8_test_support::golden_models::{GoldenModel, write_model};
use std::path::PathBuf;

pub type Outcome = Result<(), Box<dyn std::error::Error>>;

/// All adapters that PEFT wrote.
pub const ADAPTERS: [&str; 7] = [
    "llama.names",
    "llama.all",
    "qwen2.regex",
    "qwen3.layers",
    "phi3.fused",
    "mixtral.attention",
    "bert.all",
];

/// The directory of an adapter that PEFT wrote.
pub fn adapter_dir(name: &str) -> PathBuf {
    golden("adapters").join(name)
}

/// What PEFT's model computes with it.
pub fn expected(name: &str) -> Tensor {
    let path = golden("adapters").join("expected.safetensors");
    let all = candle_core::safetensors::load(path, &Device::Cpu).expect("tensors");
    all[&format!("{name}.output")].clone()
}

/// The family of an adapter's base.
pub fn family(name: &str) -> &str {
    name.split('.').next().unwrap_or(name)
}

/// A model of the golden data, in a directory.
pub struct Base {
    pub dir: tempfile::TempDir,
    pub golden: GoldenModel,
}

impl Base {
    pub fn new(family: &str) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let golden = write_model(family, dir.path());
        Self { dir, golden }
    }

    pub fn open(&self) -> Model {
        open(self.dir.path(), &ModelOptions::new()).expect("a model")
    }

    /// The same model in FP8, in another directory.
    pub fn quantized(&self) -> Self {
        let dir = tempfile::tempdir().expect("a folder");
        let options = QuantizeOptions::new(Scheme::ChannelToken);
        let source = Checkpoint::open_dir(self.dir.path()).expect("a checkpoint");
        rewrite::quantize(&source, dir.path(), &options, &mut rewrite::quiet).expect("written");
        let golden = GoldenModel {
            ids: self.golden.ids.clone(),
            output: self.golden.output.clone(),
        };
        Self { dir, golden }
    }

    pub fn ids(&self) -> &Tensor {
        &self.golden.ids
    }
}

/// Adds an adapter whose matrices are not zero. Returns its variables.
pub fn add_random(model: &mut Model, name: &str, config: &AdapterConfig, seed: u64) -> VarMap {
    let vars = VarMap::new();
    let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    model.add_adapter(name, config, vb).expect("an adapter");
    let mut named: Vec<_> = (vars.data().lock().expect("the variables").iter())
        .map(|(name, var)| (name.clone(), var.clone()))
        .collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    for (i, (_, var)) in named.iter().enumerate() {
        let value = fp8_test_support::tensor(seed + i as u64, var.dims());
        var.set(&(value * 0.2).expect("a value")).expect("set");
    }
    vars
}

pub fn values(x: &Tensor) -> Vec<f32> {
    let x = x.flatten_all().expect("flat");
    x.to_vec1().expect("values")
}
