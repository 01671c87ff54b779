//! Group normalization with a path.

use super::identity::path_methods;
use super::scaled_parameter::scaled;
use crate::array::{Array, Layer};
use crate::module::show;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Result, Tensor};
use candle_nn::{Init, VarBuilder};
use fp8_scaled::Parameter;
use std::sync::Arc;
use tracing::span::EnteredSpan;

/// `candle_nn::GroupNorm` that knows its checkpoint path and shows its parameters.
#[derive(Debug, Clone)]
pub struct GroupNorm {
    inner: candle_nn::GroupNorm,
    weight: Parameter,
    bias: Parameter,
    num_groups: usize,
    eps: f64,
    path: Option<Arc<str>>,
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
        let (own_weight, own_bias) = (Parameter::of(&weight), Parameter::of(&bias));
        Ok(Self {
            inner: candle_nn::GroupNorm::new(weight, bias, num_channels, num_groups, eps)?,
            weight: own_weight,
            bias: own_bias,
            num_groups,
            eps,
            path: None,
        })
    }

    /// `[num_channels]`.
    pub fn weight(&self) -> &Tensor {
        self.weight.tensor()
    }

    /// `[num_channels]`.
    pub fn bias(&self) -> &Tensor {
        self.bias.tensor()
    }

    /// Enters the span of a forward pass.
    fn entered(&self) -> EnteredSpan {
        tracing::trace_span!("norm", kind = "group-norm", path = self.path()).entered()
    }
}

path_methods!(GroupNorm);

impl Module for GroupNorm {
    /// `[batch, num_channels, ..]` to the same shape.
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let _span = self.entered();
        if self.weight.scaled().is_none() {
            return self.inner.forward(x);
        }
        let value =
            |parameter: &Parameter| Ok::<_, candle_core::Error>(parameter.value(x.dtype())?);
        let (weight, bias) = (value(&self.weight)?, value(&self.bias)?);
        let channels = weight.elem_count();
        candle_nn::GroupNorm::new(weight, bias, channels, self.num_groups, self.eps)?.forward(x)
    }
}

impl<A: Array> Layer<A> for GroupNorm {
    fn apply(&self, x: &A) -> crate::Result<A> {
        x.by_kind(
            |x| Ok(self.forward(x)?),
            |x| {
                let _span = self.entered();
                let gain = scaled(&self.weight, self.path(), "weight")?;
                let bias = scaled(&self.bias, self.path(), "bias")?;
                Ok(x.group_norm(self.num_groups, &gain, Some(&bias), self.eps)?)
            },
            |x| x.unsupported("a group norm"),
        )
    }
}

impl Fp8Module for GroupNorm {
    fn visit(&self, visitor: &mut dyn Visitor) {
        show(visitor, self.path.as_deref(), "weight", self.weight());
        show(visitor, self.path.as_deref(), "bias", self.bias());
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
    let norm = GroupNorm::new(weight, bias, num_channels, num_groups, eps)?;
    Ok(norm.with_path(vb.prefix()))
}
