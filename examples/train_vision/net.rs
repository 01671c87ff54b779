//! The two networks.

use crate::images::data::CLASSES;
use crate::images::layers::mlp;
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;
use clap::ValueEnum;
use fp8::Fp8Module;
use fp8::nn::ops::max_pool2d;
use fp8::nn::{self, BatchNorm, Conv2d, Conv2dConfig, Linear, ModuleT};
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ModelName {
    /// Linear layers: 784-512-256-10 for images of 28x28, 64-64-10 for the digits
    Mlp,
    /// Three convolutions with batch norm, and a linear layer
    Conv,
}

#[derive(Fp8Module)]
pub enum Net {
    Mlp(Vec<Linear>),
    Conv(Box<ConvNet>),
}

#[derive(Fp8Module)]
pub struct ConvNet {
    convolutions: Vec<Conv2d>,
    norms: Vec<BatchNorm>,
    head: Linear,
}

impl Net {
    pub fn new(name: ModelName, size: usize, vb: VarBuilder<'_>) -> Result<Self> {
        match name {
            ModelName::Mlp => Ok(Self::Mlp(mlp(size, vb)?)),
            ModelName::Conv => {
                let channels = [1, 16, 32, 32];
                let config = Conv2dConfig {
                    padding: 1,
                    ..Conv2dConfig::default()
                };
                let pairs = channels.windows(2).enumerate();
                let convolutions = pairs.map(|(i, pair)| {
                    let vb = vb.pp(format!("convolutions.{i}"));
                    nn::conv2d_no_bias(pair[0], pair[1], 3, config, vb)
                });
                let norms = channels[1..].iter().enumerate();
                let norms = norms.map(|(i, &channels)| {
                    nn::batch_norm(channels, 1e-5, vb.pp(format!("norms.{i}")))
                });
                // Two of the three are followed by pooling.
                let features = channels[3] * (size / 4).pow(2);
                Ok(Self::Conv(Box::new(ConvNet {
                    convolutions: convolutions.collect::<Result<_>>()?,
                    norms: norms.collect::<Result<_>>()?,
                    head: nn::linear(features, CLASSES, vb.pp("head"))?,
                })))
            }
        }
    }

    /// Images `[batch, 1, size, size]` to logits `[batch, CLASSES]`.
    pub fn forward(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        match self {
            Self::Mlp(layers) => {
                let mut x = x.flatten_from(1)?;
                for (i, layer) in layers.iter().enumerate() {
                    x = layer.forward(&x)?;
                    if i + 1 < layers.len() {
                        x = x.relu()?;
                    }
                }
                Ok(x)
            }
            Self::Conv(net) => {
                let mut x = x.clone();
                for (i, (convolution, norm)) in net.convolutions.iter().zip(&net.norms).enumerate()
                {
                    x = norm.forward_t(&convolution.forward(&x)?, train)?.relu()?;
                    if i < 2 {
                        x = max_pool2d(&x, 2)?;
                    }
                }
                net.head.forward(&x.flatten_from(1)?)
            }
        }
    }
}
