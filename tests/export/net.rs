//! The network that most tests export.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::config::{LayerFilter, Recipe};
use fp8::nn::{self, Linear, NamedTensor};
use fp8::{Autocast, Fp8Module, fp8_autocast, prepare_fp8};
use fp8_test_support::{device, fill};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

pub const VOCAB: usize = 24;
pub const WIDTH: usize = 16;
pub const HIDDEN: usize = 40;

#[derive(Fp8Module)]
pub struct Block {
    pub fc1: Linear,
    pub fc2: Linear,
}

#[derive(Fp8Module)]
pub struct Net {
    pub embed: nn::Embedding,
    pub blocks: Vec<Block>,
    pub norm: nn::LayerNorm,
    pub scale: NamedTensor,
    pub head: Linear,
}

impl Net {
    pub fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let block = |i: usize| {
            let vb = vb.pp("blocks").pp(i);
            Ok(Block {
                fc1: nn::linear(WIDTH, HIDDEN, vb.pp("fc1"))?,
                fc2: nn::linear_no_bias(HIDDEN, WIDTH, vb.pp("fc2"))?,
            })
        };
        Ok(Self {
            embed: nn::embedding(VOCAB, WIDTH, vb.pp("embed"))?,
            blocks: (0..2).map(block).collect::<candle_core::Result<_>>()?,
            norm: nn::layer_norm(WIDTH, 1e-5, vb.pp("norm"))?,
            scale: NamedTensor::new("scale", vb.get(WIDTH, "scale")?),
            head: nn::linear(WIDTH, VOCAB, vb.pp("head"))?,
        })
    }

    pub fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.blocks
            .iter()
            .flat_map(|block| [&block.fc1, &block.fc2])
    }
}

impl Module for Net {
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        let mut h = self
            .embed
            .forward(ids)?
            .broadcast_mul(self.scale.tensor())?;
        for block in &self.blocks {
            h = (&h + block.fc2.forward(&block.fc1.forward(&h)?.gelu_erf()?)?)?;
        }
        self.head.forward(&self.norm.forward(&h)?)
    }
}

/// A net of which all layers but the head are prepared.
pub fn prepared() -> (VarMap, Net) {
    let vars = VarMap::new();
    let net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, 7);
    let report = prepare_fp8(&net, &LayerFilter::new().skip_paths(["head"]).into()).unwrap();
    assert_eq!(report.converted(), 4, "{report}");
    (vars, net)
}

pub fn ids(seed: u32) -> Tensor {
    let ids: Vec<u32> = (0..12).map(|i| (i * 7 + seed * 5) % VOCAB as u32).collect();
    Tensor::from_vec(ids, (2, 6), &device()).unwrap()
}

pub fn calibrate(net: &dyn Module, recipe: impl Into<Recipe>) {
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    for seed in 0..3 {
        net.forward(&ids(seed)).unwrap();
    }
    guard.close().unwrap();
}

/// A net calibrated with `recipe`.
pub fn calibrated(recipe: impl Into<Recipe>) -> (VarMap, Net) {
    let (vars, net) = prepared();
    calibrate(&net, recipe);
    (vars, net)
}

/// Forward in an evaluation guard.
pub fn eval(net: &dyn Module, recipe: impl Into<Recipe>, ids: &Tensor) -> Tensor {
    let guard = fp8_autocast(Autocast::new(recipe).training(false)).unwrap();
    let y = net.forward(ids).unwrap();
    guard.close().unwrap();
    y
}

pub fn dir() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

pub fn candle_var_builder(path: &Path, dtype: DType) -> VarBuilder<'static> {
    // SAFETY: nothing changes the file while the test reads it.
    unsafe { VarBuilder::from_mmaped_safetensors(&[path], dtype, &device()) }.unwrap()
}

pub fn json_of(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Dtype and shape of each tensor of a file, read by the safetensors crate.
pub fn contents(path: &Path) -> BTreeMap<String, (Dtype, Vec<usize>)> {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let describe =
        |(name, view): (String, TensorView<'_>)| (name, (view.dtype(), view.shape().to_vec()));
    file.tensors().into_iter().map(describe).collect()
}

pub fn names_in(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}
