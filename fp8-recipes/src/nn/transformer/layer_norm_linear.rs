//! A norm and the linear layer after it.

use super::block::{Block, calls};
use super::config::{NormKind, TransformerConfig};
use super::inputs::LayerInputs;
use super::key_values::KeyValues;
use super::{LayerNorm, Linear};
use crate::Fp8Module;
use crate::array::{Array, Layer};
use crate::error::Result;
use crate::nn::layer_norm::LayerNormConfig;
use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;

/// A norm and the linear layer after it, as one node.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Tensor};
/// use fp8::nn::{self, LayerNormLinear, Linear, Module};
/// # fn main() -> candle_core::Result<()> {
/// let device = Device::Cpu;
/// let norm = nn::LayerNorm::new(Tensor::ones(8, DType::F32, &device)?, Tensor::zeros(8, DType::F32, &device)?, 1e-5);
/// let layer = LayerNormLinear::new(norm, Linear::new(Tensor::randn(0f32, 1., (16, 8), &device)?, None));
/// assert_eq!(layer.forward(&Tensor::randn(0f32, 1., (2, 3, 8), &device)?)?.dims(), [2, 3, 16]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
pub struct LayerNormLinear {
    norm: LayerNorm,
    linear: Linear,
    single_node: bool,
}

impl LayerNormLinear {
    /// `linear` after `norm`.
    pub fn new(norm: LayerNorm, linear: Linear) -> Self {
        Self {
            norm,
            linear,
            single_node: true,
        }
    }

    /// The norm.
    pub fn norm(&self) -> &LayerNorm {
        &self.norm
    }

    /// The linear layer.
    pub fn linear(&self) -> &Linear {
        &self.linear
    }
}

calls!(features LayerNormLinear);

impl Block for LayerNormLinear {
    const NAME: &'static str = "layer-norm-linear";

    fn norms(&self) -> Vec<&LayerNorm> {
        vec![&self.norm]
    }

    fn linears(&self) -> Vec<&Linear> {
        vec![&self.linear]
    }

    fn wants_single_node(&self) -> bool {
        self.single_node
    }

    fn body<A: Array>(
        &self,
        x: &A,
        _: &LayerInputs<'_>,
        _: Option<&mut KeyValues<A>>,
    ) -> Result<A> {
        self.linear.apply(&self.norm.apply(x)?)
    }
}

/// A [`LayerNormLinear`] with the parameters `norm.weight`, `norm.bias`, `linear.weight` and `linear.bias`; norm, epsilon and
/// biases as `config` says.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn layer_norm_linear(
    in_dim: usize,
    out_dim: usize,
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<LayerNormLinear> {
    Ok(LayerNormLinear::new(
        norm(in_dim, config, vb.pp("norm"))?,
        crate::nn::linear_b(in_dim, out_dim, config.bias, vb.pp("linear"))?,
    ))
}

/// The norm that `config` asks for.
pub(super) fn norm(
    size: usize,
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<LayerNorm> {
    let center = config.norm == NormKind::LayerNorm;
    let own = LayerNormConfig {
        eps: config.norm_eps,
        remove_mean: center,
        affine: center,
    };
    crate::nn::layer_norm(size, own, vb)
}
