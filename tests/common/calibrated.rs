//! A small model to calibrate and export.
#![allow(dead_code)] // each test binary uses its own part

#[path = "recipes.rs"]
pub mod recipes;

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::recipes::config::{CastConfig, Fp8LinearConfig, Recipe};
use fp8::recipes::load::var_builder;
use fp8::recipes::nn::{self, Linear};
use fp8::recipes::{Autocast, Fp8Module, fp8_autocast};
use recipes::{device, fill, prepare, tensor};
use serde_json::Value;
use std::fs;
use std::path::Path;

pub const IN: usize = 64;
pub const HIDDEN: usize = 96;

#[derive(Fp8Module)]
pub struct Net {
    pub up: Linear,
    pub down: Linear,
}

impl Net {
    pub fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        Ok(Self {
            up: nn::linear(IN, HIDDEN, vb.pp("up"))?,
            down: nn::linear_no_bias(HIDDEN, IN, vb.pp("down"))?,
        })
    }

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

pub fn fresh(seed: u64) -> Net {
    let vars = VarMap::new();
    let mut net = Net::new(VarBuilder::from_varmap(&vars, DType::F32, &device())).unwrap();
    fill(&vars, seed);
    prepare(&mut net);
    net
}

pub fn calibrate(model: &dyn Module, recipe: impl Into<Recipe>, x: &Tensor) {
    let guard = fp8_autocast(Autocast::new(recipe).calibrating(true)).unwrap();
    model.forward(x).unwrap();
    guard.close().unwrap();
}

pub fn eval(model: &dyn Module, recipe: impl Into<Recipe>, x: &Tensor) -> Tensor {
    let _guard = fp8_autocast(Autocast::new(recipe).training(false)).unwrap();
    model.forward(x).unwrap()
}

pub fn x() -> Tensor {
    tensor(11, &[7, IN])
}

pub fn casts(weight: CastConfig, input: CastConfig) -> Fp8LinearConfig {
    Fp8LinearConfig::default()
        .with_weight(weight)
        .with_input(input)
}

pub fn blocks(rows: usize, cols: usize) -> CastConfig {
    CastConfig::dynamic_blockwise(rows, cols)
}

pub fn quantization(dir: &Path) -> Value {
    let text = fs::read(dir.join("config.json")).unwrap();
    serde_json::from_slice::<Value>(&text).unwrap()["quantization_config"].clone()
}
