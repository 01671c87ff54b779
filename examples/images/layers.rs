//! The layers of the MLP, and the initial values of all parameters.

use super::data::CLASSES;
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use fp8::nn::{self, Linear};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// 784-512-256-10 features for images of 28x28, 64-64-10 for the digits.
pub fn mlp(size: usize, vb: VarBuilder<'_>) -> candle_core::Result<Vec<Linear>> {
    let inner: &[usize] = if size > 16 { &[512, 256] } else { &[64] };
    let sizes = [&[size * size], inner, &[CLASSES]].concat();
    let layers = sizes.windows(2).enumerate();
    let layers = layers.map(|(i, pair)| nn::linear(pair[0], pair[1], vb.pp(format!("layers.{i}"))));
    layers.collect()
}

/// Weights from the seed, uniform up to `sqrt(3 / inputs)`; biases are 0, gains of norms stay 1.
pub fn uniform(seed: u64) -> impl FnMut(&str, &[usize]) -> Result<Option<Tensor>> {
    let mut rng = StdRng::seed_from_u64(seed);
    move |name, shape| {
        if shape.len() > 1 {
            let inputs: usize = shape[1..].iter().product();
            let bound = (3. / inputs as f32).sqrt();
            let count = shape.iter().product();
            let values: Vec<f32> = (0..count)
                .map(|_| rng.random_range(-bound..bound))
                .collect();
            return Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?));
        }
        let zeros = || Tensor::zeros(shape, DType::F32, &Device::Cpu);
        Ok(name.ends_with("bias").then(zeros).transpose()?)
    }
}
