//! Group normalization with a path.

use super::show;
use crate::scaled::refuse_scaled;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};

/// `candle_nn::GroupNorm` that knows its checkpoint path and shows its parameters.
#[derive(Debug, Clone)]
pub struct GroupNorm {
    inner: candle_nn::GroupNorm,
    weight: Tensor,
    bias: Tensor,
    path: Option<String>,
}

impl GroupNorm {
    /// `weight`, `bias`: `[num_channels]`.
    ///
    /// # Errors
    /// If `num_groups` does not divide `num_channels`.
    pub fn new(
        weight: Tensor,
        bias: Tensor,
        num_channels: usize,
        num_groups: usize,
        eps: f64,
    ) -> Result<Self> {
        let (own_weight, own_bias) = (weight.clone(), bias.clone());
        Ok(Self {
            inner: candle_nn::GroupNorm::new(weight, bias, num_channels, num_groups, eps)?,
            weight: own_weight,
            bias: own_bias,
            path: None,
        })
    }

    /// Sets the checkpoint path.
    #[must_use]
    pub fn with_path(mut self, path: impl Into<String>) -> Self {
        self.path = Some(path.into());
        self
    }

    /// `[num_channels]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// `[num_channels]`.
    pub fn bias(&self) -> &Tensor {
        &self.bias
    }
}

impl Module for GroupNorm {
    /// `[batch, num_channels, ..]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.inner.forward(x)
    }
}

impl Fp8Module for GroupNorm {
    fn visit(&self, visitor: &mut dyn Visitor) {
        show(visitor, self.path.as_deref(), "weight", &self.weight);
        show(visitor, self.path.as_deref(), "bias", &self.bias);
    }
}

/// Creates or loads a group norm, with candle-nn's initialization.
///
/// # Errors
/// If a tensor is missing or has another shape, or `num_groups` does not divide `num_channels`.
pub fn group_norm(
    num_groups: usize,
    num_channels: usize,
    eps: f64,
    vb: VarBuilder<'_>,
) -> Result<GroupNorm> {
    let weight = vb.get_with_hints(num_channels, "weight", Init::Const(1.))?;
    let bias = vb.get_with_hints(num_channels, "bias", Init::Const(0.))?;
    refuse_scaled("a group norm", &vb.prefix(), &[&weight, &bias])?;
    let norm = GroupNorm::new(weight, bias, num_channels, num_groups, eps)?;
    Ok(norm.with_path(vb.prefix()))
}
