//! LayerNorm and RmsNorm whose gradients reach everything before them.

use super::join;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Result, Tensor};
use candle_nn::{LayerNormConfig, VarBuilder};
use fp8_candle::ops;

/// `(x - mean) / sqrt(variance + eps) * weight + bias` over the last dimension.
///
/// Same constructors as `candle_nn::LayerNorm`, which cuts the gradient when it has a bias.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    remove_mean: bool,
    eps: f64,
    path: Option<String>,
}

impl LayerNorm {
    /// `weight`, `bias`: `[size]`.
    pub fn new(weight: Tensor, bias: Tensor, eps: f64) -> Self {
        Self {
            weight,
            bias: Some(bias),
            remove_mean: true,
            eps,
            path: None,
        }
    }

    /// Without a bias.
    pub fn new_no_bias(weight: Tensor, eps: f64) -> Self {
        Self {
            weight,
            bias: None,
            remove_mean: true,
            eps,
            path: None,
        }
    }

    /// Root-mean-square norm: the mean stays.
    pub fn rms_norm(weight: Tensor, eps: f64) -> Self {
        Self {
            weight,
            bias: None,
            remove_mean: false,
            eps,
            path: None,
        }
    }

    /// Sets the checkpoint path.
    pub fn with_path(mut self, path: impl Into<String>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// `[size]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[size]`.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl Module for LayerNorm {
    /// `[.., size]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        if self.remove_mean {
            return Ok(ops::layer_norm(
                x,
                &self.weight,
                self.bias.as_ref(),
                self.eps,
            )?);
        }
        let y = ops::rms_norm(x, &self.weight, self.eps)?;
        match &self.bias {
            None => Ok(y),
            Some(bias) => y.broadcast_add(bias),
        }
    }
}

impl Fp8Module for LayerNorm {
    fn visit(&self, visitor: &mut dyn Visitor) {
        let name = |own| self.path.as_deref().map(|path| join(path, own));
        visitor.tensor(name("weight").as_deref(), &self.weight);
        if let Some(bias) = &self.bias {
            visitor.tensor(name("bias").as_deref(), bias);
        }
    }
}

/// Creates or loads a layer norm, with candle-nn's initialization and configuration.
pub fn layer_norm<C: Into<LayerNormConfig>>(
    size: usize,
    config: C,
    vb: VarBuilder<'_>,
) -> Result<LayerNorm> {
    let config = config.into();
    let weight = vb.get_with_hints(size, "weight", candle_nn::Init::Const(1.))?;
    let bias = if config.affine {
        Some(vb.get_with_hints(size, "bias", candle_nn::Init::Const(0.))?)
    } else {
        None
    };
    Ok(LayerNorm {
        weight,
        bias,
        remove_mean: config.remove_mean,
        eps: config.eps,
        path: Some(vb.prefix()),
    })
}

/// Creates or loads a layer norm without bias.
pub fn layer_norm_no_bias(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<LayerNorm> {
    let config = LayerNormConfig {
        eps,
        remove_mean: true,
        affine: false,
    };
    layer_norm(size, config, vb)
}

/// `x / sqrt(mean(x^2) + eps) * weight` over the last dimension.
///
/// Same constructors as `candle_nn::RmsNorm`, which cuts the gradient.
#[derive(Debug, Clone)]
pub struct RmsNorm(LayerNorm);

impl RmsNorm {
    /// `weight`: `[size]`.
    pub fn new(weight: Tensor, eps: f64) -> Self {
        Self(LayerNorm::rms_norm(weight, eps))
    }

    /// Sets the checkpoint path.
    pub fn with_path(self, path: impl Into<String>) -> Self {
        Self(self.0.with_path(path))
    }

    /// `[size]`.
    pub fn weight(&self) -> &Tensor {
        self.0.weight()
    }
}

impl Module for RmsNorm {
    /// `[.., size]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.0.forward(x)
    }
}

impl Fp8Module for RmsNorm {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.0.visit(visitor);
    }
}

/// Creates or loads an RMS norm, with candle-nn's initialization.
pub fn rms_norm(size: usize, eps: f64, vb: VarBuilder<'_>) -> Result<RmsNorm> {
    let config = LayerNormConfig {
        eps,
        remove_mean: false,
        affine: false,
    };
    Ok(RmsNorm(layer_norm(size, config, vb)?))
}
