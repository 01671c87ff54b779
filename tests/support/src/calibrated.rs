//! A small model to calibrate and export.

use crate::{device, fill, prepare, tensor};
use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::config::{CastConfig, Fp8LinearConfig, Recipe};
use fp8_recipes::load::var_builder;
use fp8_recipes::nn::{self, Linear};
use fp8_recipes::{Autocast, Fp8Module, fp8_autocast};
use serde_json::Value;
use std::fs;
use std::path::Path;

/// Width of input and result.
pub const IN: usize = 64;
/// Rows of the embedding of [`Tied`].
pub const VOCAB: usize = 24;
/// Width between the layers.
pub const HIDDEN: usize = 96;

/// Two layers with a ReLU between them.
#[derive(Fp8Module)]
pub struct Net {
    /// The first layer, with a bias.
    pub up: Linear,
    /// The second layer, without one.
    pub down: Linear,
}

impl Net {
    /// Variables from `vb`.
    pub fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            up: nn::linear(IN, HIDDEN, vb.pp("up"))?,
            down: nn::linear_no_bias(HIDDEN, IN, vb.pp("down"))?,
        })
    }

    /// From `model.safetensors` in `dir`.
    pub fn load(dir: &Path) -> Self {
        let path = dir.join("model.safetensors");
        Self::new(var_builder(&[path], DType::F32, &device()).unwrap()).unwrap()
    }
}

impl Module for Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.down.forward(&self.up.forward(x)?.relu()?)
    }
}

/// A model whose last layer can share its weight with the embedding.
#[derive(Fp8Module)]
pub struct Tied {
    /// [`VOCAB`] rows of width [`IN`].
    pub embed: nn::Embedding,
    /// Between embedding and head.
    pub fc: Linear,
    /// Its weight is that of the embedding, or one of its own.
    pub head: Linear,
}

impl Tied {
    /// Variables from `vb`; without one for the head if it `ties` its weight to the embedding.
    pub fn new(vb: VarBuilder<'_>, ties: bool) -> Self {
        let embed = nn::embedding(VOCAB, IN, vb.pp("embed")).unwrap();
        let head = match ties {
            true => Linear::new(embed.embeddings().clone(), None).with_path("head"),
            false => nn::linear_no_bias(IN, VOCAB, vb.pp("head")).unwrap(),
        };
        let fc = nn::linear_no_bias(IN, IN, vb.pp("fc")).unwrap();
        Self { embed, fc, head }
    }
}

impl Module for Tied {
    fn forward(&self, ids: &Tensor) -> candle_core::Result<Tensor> {
        self.head
            .forward(&self.fc.forward(&self.embed.forward(ids)?)?)
    }
}

/// A prepared net whose values depend on `seed`.
pub fn fresh(seed: u64) -> Net {
    let vars = VarMap::new();
    let mut net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, seed);
    prepare(&mut net);
    net
}

/// One forward pass in a calibrating guard.
pub fn calibrate(model: &dyn Module, recipe: impl Into<Recipe>, x: &Tensor) {
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    model.forward(x).unwrap();
    guard.close().unwrap();
}

/// Forward in an evaluation guard.
pub fn eval(model: &dyn Module, recipe: impl Into<Recipe>, x: &Tensor) -> Tensor {
    let _guard = fp8_autocast(Autocast::new(recipe).training(false)).unwrap();
    model.forward(x).unwrap()
}

/// An input.
pub fn x() -> Tensor {
    tensor(11, &[7, IN])
}

/// A configuration with these casts of weight and input.
pub fn casts(weight: CastConfig, input: CastConfig) -> Fp8LinearConfig {
    Fp8LinearConfig::default()
        .with_weight(weight)
        .with_input(input)
}

/// A dynamic cast in blocks.
pub fn blocks(rows: usize, cols: usize) -> CastConfig {
    CastConfig::dynamic_blockwise(rows, cols)
}

/// `quantization_config` of `config.json` in `dir`.
pub fn quantization(dir: &Path) -> Value {
    let text = fs::read(dir.join("config.json")).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["quantization_config"].clone()
}
