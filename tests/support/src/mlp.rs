//! A model of two linear layers.

use crate::tensor;
use candle_core::{Result, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::Fp8Module;
use fp8_recipes::nn::{self, Linear};

/// Two layers with a norm and a GELU between them.
#[derive(Debug, Clone, Fp8Module)]
pub struct Mlp {
    /// The first layer.
    pub up: Linear,
    /// Between the layers.
    pub norm: nn::LayerNorm,
    /// The second layer.
    pub down: Linear,
}

impl Mlp {
    /// Width of the input.
    pub const IN: usize = 12;
    /// Width between the layers.
    pub const HIDDEN: usize = 20;
    /// Width of the result.
    pub const OUT: usize = 6;

    /// Variables from `vb`.
    pub fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            up: nn::linear(Self::IN, Self::HIDDEN, vb.pp("up"))?,
            norm: nn::layer_norm(Self::HIDDEN, 1e-5, vb.pp("norm"))?,
            down: nn::linear(Self::HIDDEN, Self::OUT, vb.pp("down"))?,
        })
    }
}

impl candle_core::Module for Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.down
            .forward(&self.norm.forward(&self.up.forward(x)?)?.gelu_erf()?)
    }
}

/// The variables in the order of their names.
pub fn named(vars: &VarMap) -> Vec<(String, Var)> {
    let data = vars.data().lock().unwrap();
    let mut all: Vec<_> = data.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// Gives every variable values that depend on its name and `seed` only.
pub fn fill(vars: &VarMap, seed: u64) {
    let vars = vars.data().lock().unwrap();
    for (name, var) in vars.iter() {
        let salt = name
            .bytes()
            .fold(seed, |hash, b| hash.wrapping_mul(31) + u64::from(b));
        let noise = (tensor(salt, var.dims()) * 0.4).unwrap();
        // Norm weights stay near 1.
        let value = if name.ends_with("norm.weight") {
            (noise + 1.).unwrap()
        } else {
            noise
        };
        var.set(&value.to_device(var.device()).unwrap()).unwrap();
    }
}
