//! The model, defined once for plain and for scaled tensors.

use crate::data::CLASSES;
use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use fp8::scaled::{Array, Direction, Layer, Norm};
use fp8::{Fp8Module, nn};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

/// Linear layers with ReLU between them.
#[derive(Fp8Module)]
pub struct Mlp {
    pub layers: Vec<nn::Linear>,
}

/// Who looks at the input and the output of each layer on their way; gives back the output.
pub type Look<'a, A> = &'a mut dyn FnMut(usize, &A, A) -> A;

impl Mlp {
    pub fn new(size: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let inner: &[usize] = if size > 16 { &[512, 256] } else { &[64] };
        let sizes = [&[size * size], inner, &[CLASSES]].concat();
        let layers = sizes.windows(2).enumerate();
        let layers =
            layers.map(|(i, pair)| nn::linear(pair[0], pair[1], vb.pp(format!("layers.{i}"))));
        Ok(Self {
            layers: layers.collect::<candle_core::Result<_>>()?,
        })
    }

    /// Images `[batch, size * size]` to logits `[batch, CLASSES]`.
    pub fn forward<A: Array>(&self, x: &A, look: Look<'_, A>) -> Result<A> {
        let mut x = x.clone();
        for (i, layer) in self.layers.iter().enumerate() {
            let y = look(i, &x, layer.apply(&x)?);
            // Gradients of later steps are much smaller than those of the first: a scaled run keeps their data near 1.
            let y = y.rescale(Norm::L2, Direction::Backward)?;
            x = if i + 1 < self.layers.len() {
                y.relu()?
            } else {
                y
            };
        }
        Ok(x)
    }
}

/// Weights by the seed, uniform up to `sqrt(3 / inputs)`; biases are 0.
pub fn initialize(
    mut shapes: Vec<(String, Vec<usize>)>,
    seed: u64,
    mut set: impl FnMut(&str, Tensor) -> Result<()>,
) -> Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    shapes.sort();
    for (name, shape) in shapes {
        let value = match *shape {
            [_, inputs] => {
                let bound = (3. / inputs as f32).sqrt();
                let count: usize = shape.iter().product();
                let values: Vec<f32> = (0..count)
                    .map(|_| rng.random_range(-bound..bound))
                    .collect();
                Tensor::from_vec(values, shape, &Device::Cpu)?
            }
            _ => Tensor::zeros(shape, DType::F32, &Device::Cpu)?,
        };
        set(&name, value)?;
    }
    Ok(())
}
