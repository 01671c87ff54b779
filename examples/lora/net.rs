//! A small model that predicts the next byte of a text, and the same with adapters.

use anyhow::{Context, Result};
use candle_core::{Device, Module, Tensor};
use candle_nn::{Init, VarBuilder, VarMap};
use fp8::Fp8Module;
use fp8::nn::{Embedding, Linear, embedding, linear, linear_no_bias, ops};
use rand::Rng;
use rand::rngs::StdRng;
use rand_distr::{Distribution, Normal};

/// Bytes that the next one is predicted from.
const CONTEXT: usize = 16;
const EMBED: usize = 16;
const HIDDEN: usize = 512;
/// Weight of the adapters, divided by their rank.
const ALPHA: f64 = 16.;

/// Bytes in, logits of the next byte out; `L` is [`Linear`] or [`Lora`].
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
    pub fn with_adapters(self, rank: usize, vb: VarBuilder<'_>) -> Result<Net<Lora>> {
        Ok(Net {
            embed: self.embed,
            up: Lora::new(self.up, rank, vb.pp("up"))?,
            down: Lora::new(self.down, rank, vb.pp("down"))?,
            head: Lora::new(self.head, rank, vb.pp("head"))?,
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
    /// Mean cross entropy of a batch of [`batch`].
    pub fn loss(&self, (bytes, next): &(Tensor, Tensor)) -> candle_core::Result<Tensor> {
        let x = self.embed.forward(bytes)?.flatten_from(1)?;
        let x = ops::gelu(&self.up.forward(&x)?)?;
        let x = ops::gelu(&self.down.forward(&x)?)?;
        ops::cross_entropy(&self.head.forward(&x)?, next)
    }
}

/// `y = base(x) + ALPHA / rank (x A^T) B^T` with a frozen base. A and B are trained in f32; B starts at zero, so that training begins
/// with the base's own output.
pub struct Lora {
    base: Linear,
    a: Tensor,
    b: Tensor,
    scale: f64,
}

impl Lora {
    fn new(base: Linear, rank: usize, vb: VarBuilder<'_>) -> Result<Self> {
        let (out_features, in_features) = base.features();
        let init = Init::Const(0.);
        Ok(Self {
            base,
            a: vb.get_with_hints((rank, in_features), "lora_A.weight", init)?,
            b: vb.get_with_hints((out_features, rank), "lora_B.weight", init)?,
            scale: ALPHA / rank as f64,
        })
    }
}

impl Module for Lora {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let update = x.matmul(&self.a.t()?)?.matmul(&self.b.t()?)?;
        self.base.forward(x)? + (update * self.scale)?
    }
}

/// Matrices from a normal distribution, all else zero, from a seed; candle's own generator cannot be seeded on the CPU.
pub fn initialize(vars: &VarMap, rng: &mut StdRng) -> Result<()> {
    let vars = vars.data().lock().ok().context("the VarMap is poisoned")?;
    let mut names: Vec<&String> = vars.keys().collect();
    names.sort();
    for name in names {
        let var = &vars[name];
        let scale = match var.dims() {
            [_, inputs] if !name.ends_with("lora_B.weight") => 1. / (*inputs as f32).sqrt(),
            _ => 0.,
        };
        let normal = Normal::new(0f32, scale)?;
        let values = (0..var.elem_count()).map(|_| normal.sample(rng)).collect();
        var.set(&Tensor::from_vec(values, var.shape(), var.device())?)?;
    }
    Ok(())
}

/// `size` random places of a text: the bytes before them, U32 `[size, CONTEXT]`, and the bytes there, U32 `[size]`.
pub fn batch(
    text: &[u8],
    size: usize,
    rng: &mut StdRng,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let (mut bytes, mut next) = (vec![], vec![]);
    for _ in 0..size {
        let first = rng.random_range(0..text.len() - CONTEXT);
        bytes.extend(
            text[first..first + CONTEXT]
                .iter()
                .map(|&byte| u32::from(byte)),
        );
        next.push(u32::from(text[first + CONTEXT]));
    }
    Ok((
        Tensor::from_vec(bytes, (size, CONTEXT), device)?,
        Tensor::from_vec(next, size, device)?,
    ))
}
