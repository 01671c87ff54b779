//! The model, defined once for plain and for scaled tensors.

use crate::images::layers::mlp;
use anyhow::Result;
use candle_nn::VarBuilder;
use fp8::scaled::{Array, Direction, Layer, Norm};
use fp8::{Fp8Module, nn};

/// Linear layers with ReLU between them.
#[derive(Fp8Module)]
pub struct Mlp {
    pub layers: Vec<nn::Linear>,
}

/// Called with the index, the input and the output of each layer; returns the output.
pub type Look<'a, A> = &'a mut dyn FnMut(usize, &A, A) -> A;

impl Mlp {
    pub fn new(size: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let layers = mlp(size, vb)?;
        Ok(Self { layers })
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
