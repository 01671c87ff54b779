//! A small model that predicts the next byte of a text, and the same with adapters.

use crate::parameters::set_plain;
use anyhow::Result;
use candle_core::{Device, Module, Tensor};
use candle_nn::{VarBuilder, VarMap};
use fp8::Fp8Module;
use fp8::nn::{Embedding, Linear, LoraConfig, LoraLinear, embedding, linear, linear_no_bias, ops};
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

/// The number of bytes that the next one is predicted from.
pub const CONTEXT: usize = 16;
const EMBED: usize = 16;
const HIDDEN: usize = 512;
/// Weight of the adapters; it is divided by their rank.
const ALPHA: f64 = 16.;

/// Bytes in, logits of the next byte out; `L` is [`Linear`] or [`LoraLinear`].
#[derive(Fp8Module)]
pub struct Net<L> {
    embed: Embedding,
    up: L,
    down: L,
    head: L,
}

impl Net<Linear> {
    /// Over variables to train, or over a checkpoint: with `fp8::load::var_builder` the layers hold FP8 codes.
    pub fn new(vb: VarBuilder<'_>) -> Result<Self> {
        Ok(Self {
            embed: embedding(256, EMBED, vb.pp("embed"))?,
            up: linear(CONTEXT * EMBED, HIDDEN, vb.pp("up"))?,
            down: linear(HIDDEN, HIDDEN / 2, vb.pp("down"))?,
            head: linear_no_bias(HIDDEN / 2, 256, vb.pp("head"))?,
        })
    }

    /// Adapters of this rank beside every linear layer, over the variables of `vb`.
    pub fn with_adapters(self, rank: usize, vb: VarBuilder<'_>) -> Result<Net<LoraLinear>> {
        let config = LoraConfig::new(rank).with_alpha(ALPHA);
        Ok(Net {
            embed: self.embed,
            up: LoraLinear::new(self.up, config, vb.pp("up"))?,
            down: LoraLinear::new(self.down, config, vb.pp("down"))?,
            head: LoraLinear::new(self.head, config, vb.pp("head"))?,
        })
    }

    /// (weights of the linear layers, bytes that they take with their scales).
    pub fn size(&self) -> (usize, usize) {
        let layers = [&self.up, &self.down, &self.head];
        let weights = layers.map(|layer| layer.features().0 * layer.features().1);
        let bytes = layers.map(Linear::weight_bytes);
        (weights.iter().sum(), bytes.iter().sum())
    }
}

impl<L: Module> Net<L> {
    /// Mean cross entropy of the next bytes: U32 `[size, CONTEXT]` before each, and U32 `[size]`.
    pub fn loss(&self, (bytes, next): &(Tensor, Tensor)) -> candle_core::Result<Tensor> {
        let x = self.embed.forward(bytes)?.flatten_from(1)?;
        let x = ops::gelu(&self.up.forward(&x)?)?;
        let x = ops::gelu(&self.down.forward(&x)?)?;
        ops::cross_entropy(&self.head.forward(&x)?, next)
    }
}

/// Matrices from a normal distribution, all else zero.
pub fn initialize(vars: &VarMap, rng: &mut StdRng) -> Result<()> {
    set_plain(vars, |name, shape| {
        let scale = match *shape {
            [_, inputs] if !name.ends_with("lora_B.weight") => 1. / (inputs as f32).sqrt(),
            _ => 0.,
        };
        let normal = Normal::new(0f32, scale)?;
        let count: usize = shape.iter().product();
        let values = (0..count).map(|_| normal.sample(rng)).collect();
        Ok(Some(Tensor::from_vec(values, shape, &Device::Cpu)?))
    })
}
