//! Data and models.

use candle_core::{DType, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8_recipes::load::var_builder;
use fp8_recipes::nn::{self, Linear};
use fp8_recipes::{
    Autocast, ExportOptions, Recipe, fp8_autocast, prepare_fp8, save_calibrated_with,
};
pub use fp8_test_support::rounding::{roundings, two_orders, two_products};
pub use fp8_test_support::{assert_close, device, flat, named, tensor};
use std::path::{Path, PathBuf};

pub type Outcome = Result<(), Box<dyn std::error::Error>>;

pub const IN: usize = 64;
pub const HIDDEN: usize = 96;

pub fn bits(vars: &VarMap) -> Vec<Vec<u32>> {
    let vars = named(vars);
    vars.iter()
        .map(|(_, var)| fp8_test_support::bits(var))
        .collect()
}

/// Two layers, `up` and `down`, with a ReLU between them.
pub type Net = [Linear; 2];

pub fn net(vb: VarBuilder<'_>) -> candle_core::Result<Net> {
    Ok([
        nn::linear(IN, HIDDEN, vb.pp("up"))?,
        nn::linear_no_bias(HIDDEN, IN, vb.pp("down"))?,
    ])
}

pub fn forward([up, down]: &Net, x: &Tensor) -> Tensor {
    let x = up.forward(x).unwrap().relu().unwrap();
    down.forward(&x).unwrap()
}

/// The net over its own variables, with values from the seed.
pub fn fresh(seed: u64, dtype: DType) -> (VarMap, Net) {
    let vars = VarMap::new();
    let net = net(VarBuilder::from_varmap(&vars, dtype, &device())).unwrap();
    for (i, (_, var)) in named(&vars).iter().enumerate() {
        let values = (tensor(seed + i as u64, var.dims()) * 0.2).unwrap();
        var.set(&values.to_dtype(dtype).unwrap()).unwrap();
    }
    (vars, net)
}

pub fn delayed() -> Recipe {
    "delayed".parse().unwrap()
}

/// An FP8 file of a calibrated net.
pub fn fp8_file(dir: &Path, seed: u64) -> PathBuf {
    let (_vars, net) = fresh(seed, DType::F32);
    prepare_fp8(&net, &Default::default()).unwrap();
    let guard = fp8_autocast(Autocast::new(delayed()).calibrating(true)).unwrap();
    forward(&net, &tensor(seed + 50, &[32, IN]));
    guard.close().unwrap();
    let path = dir.join("model.safetensors");
    save_calibrated_with(&net, &path, &ExportOptions::default()).unwrap();
    path
}

pub fn load(path: &Path) -> Net {
    net(var_builder(&[path], DType::F32, &device()).unwrap()).unwrap()
}
