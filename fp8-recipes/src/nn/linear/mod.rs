//! `candle_nn::linear`: the linear layer, candle-nn's outside a guard, FP8 inside one.

mod forward;

pub(super) use forward::joint;

use super::StaticWeight;
use super::identity::{SharedState, path_and_state, path_methods};
use super::scaled_parameter::freeze;
use crate::autocast::Fp8State;
use crate::error::Result;
use crate::module::Fp8Layer;
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::{LayerShards, Role, WeightSource};
use fp8_scaled::{Parameter, ScaledVar};
use std::sync::Arc;

#[derive(Debug, Clone)]
enum Weight {
    HighPrecision(Parameter),
    Fp8(Box<StaticWeight>),
}

/// `y = x weight^T + bias`, with the name, constructors and signatures of `candle_nn::Linear`, but for
/// [`Linear::weight`], which can fail.
///
/// - Outside a guard, inside a disabled one, or when the layer was not prepared: bit-equal to candle-nn's, unless it has
///   [independent rows](Linear::with_independent_rows).
/// - Prepared ([`crate::prepare_fp8`]) and inside an enabled guard: FP8 by the guard's recipe.
/// - Loaded from an FP8 checkpoint: holds the codes only and computes in FP8 (static inference), except inside a
///   disabled guard, which multiplies by the dequantized weight.
///
/// x: `[.., in_features]` of f32, bf16 or f16; the result has x's dtype. A weight or bias of another dtype is cast to
/// x's. Clones share weight and FP8 state.
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Weight,
    bias: Option<Parameter>,
    path: Option<Arc<str>>,
    shards: Option<Arc<LayerShards>>,
    independent_rows: bool,
    /// What operands of products in high precision are rounded to.
    operands: Option<DType>,
    state: SharedState,
}

impl Linear {
    /// `weight`: `[out_features, in_features]`; `bias`: `[out_features]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self::of(Weight::HighPrecision(Parameter::gathered(&weight)), bias)
    }

    /// [`Linear::new`] under the name that `with_tracing::Linear` gives it.
    pub fn from_weights(weights: Tensor, bias: Option<Tensor>) -> Self {
        Self::new(weights, bias)
    }

    /// A layer whose weight is FP8 codes.
    pub fn from_static(
        weight: StaticWeight,
        bias: Option<Tensor>,
        path: impl Into<Arc<str>>,
    ) -> Self {
        Self::of(Weight::Fp8(weight.into()), bias).with_path(path)
    }

    fn of(weight: Weight, bias: Option<Tensor>) -> Self {
        Self {
            weight,
            bias: bias.as_ref().map(Parameter::gathered),
            path: None,
            shards: None,
            independent_rows: false,
            operands: None,
            state: SharedState::default(),
        }
    }

    /// The same layer as a part of one that several ranks hold: it casts its tensors with the scales of the whole ones. Prepare it
    /// afterwards.
    pub fn with_shards(self, shards: LayerShards) -> Self {
        Self {
            shards: Some(Arc::new(shards)),
            ..self
        }
    }

    /// The same layer, whose products in high precision are those of [`fp8_candle::ops::linear`] instead of candle's: on the CPU
    /// each row of a result has the same bits whatever the number of rows beside it, as FP8 products have anyway. The models of
    /// `fp8::models` are made of such layers.
    #[must_use]
    pub fn with_independent_rows(self) -> Self {
        Self {
            independent_rows: true,
            ..self
        }
    }

    /// The same layer, whose products in high precision round their operands to `dtype`, which is bf16: those of the gradients too, as
    /// [`linear_with`](fp8_candle::ops::linear_with) does. That takes less time where the processor
    /// [multiplies bf16](fp8_candle::ops::multiplies_bf16). Rows are [independent](Linear::with_independent_rows) then. With None, the
    /// default, operands are not rounded. Products of weights in parts on several ranks, and those in the single node of
    /// [`nn::TransformerLayer`](crate::nn::TransformerLayer), never round.
    #[must_use]
    pub fn with_operands(self, dtype: Option<DType>) -> Self {
        Self {
            independent_rows: self.independent_rows || dtype.is_some(),
            operands: dtype,
            ..self
        }
    }

    /// The same layer, with the products in high precision of `other`.
    pub(super) fn with_products_of(self, other: &Self) -> Self {
        Self {
            independent_rows: other.independent_rows,
            operands: other.operands,
            ..self
        }
    }

    /// The dtype of [`Linear::with_operands`].
    pub fn operands(&self) -> Option<DType> {
        self.operands
    }

    /// The value of the weight, `[out_features, in_features]`.
    ///
    /// For a weight in high precision this is the tensor itself, which an optimizer may hold as a variable. For a layer loaded in FP8
    /// it is the dequantized value in f32, and for a scaled parameter ([`Linear::scaled_weight`]) the value in f32; both are computed
    /// at every call. Codes and scales of a layer loaded in FP8 are in [`Linear::static_weight`]. A weight in parts is gathered, by all
    /// ranks at the same time.
    ///
    /// # Errors
    /// If a device fails to dequantize.
    pub fn weight(&self) -> Result<Tensor> {
        match &self.weight {
            Weight::HighPrecision(weight) => Ok(weight.value(DType::F32)?),
            Weight::Fp8(weight) => Ok(weight.weight().dequantize(DType::F32)?),
        }
    }

    /// The weight itself, if it is a tensor in high precision: neither FP8 codes nor a scaled parameter nor in parts on several ranks.
    pub fn plain_weight(&self) -> Option<&Tensor> {
        match &self.weight {
            Weight::HighPrecision(Parameter::Plain(weight)) => Some(weight),
            _ => None,
        }
    }

    /// The scaled parameter of a layer that was built on a [`ScaledVarMap`](crate::scaled::ScaledVarMap), else None.
    pub fn scaled_weight(&self) -> Option<ScaledVar> {
        match &self.weight {
            Weight::HighPrecision(weight) => weight.scaled().cloned(),
            Weight::Fp8(_) => None,
        }
    }

    /// The FP8 weight of a layer loaded from an FP8 checkpoint.
    pub fn static_weight(&self) -> Option<&StaticWeight> {
        match &self.weight {
            Weight::HighPrecision(_) => None,
            Weight::Fp8(weight) => Some(weight),
        }
    }

    /// The bias, `[out_features]`. For a scaled parameter its data, from which [`ScaledVar::of`] finds the value.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(Parameter::tensor)
    }

    /// FP8 state, if the layer is prepared.
    pub fn fp8_state(&self) -> Option<Arc<Fp8State>> {
        self.state.get()
    }

    /// (out_features, in_features).
    pub fn features(&self) -> (usize, usize) {
        let dims = match &self.weight {
            Weight::HighPrecision(weight) => weight.tensor().dims(),
            Weight::Fp8(weight) => weight.weight().dims(),
        };
        match *dims {
            [out_features, in_features] => (out_features, in_features),
            _ => (0, 0),
        }
    }

    /// The weight where it lies in parts on several ranks, else None.
    pub(super) fn fetched_weight(&self) -> Option<Arc<dyn WeightSource>> {
        match &self.weight {
            Weight::HighPrecision(Parameter::Sharded(var)) => Some(Arc::new(var.clone())),
            _ => None,
        }
    }

    /// Bytes that the weight and its scales hold.
    pub fn weight_bytes(&self) -> usize {
        Fp8Layer::weight_bytes(self)
    }

    /// A layer of the same state with another weight.
    pub(super) fn with_weight(&self, weight: &Tensor) -> Self {
        Self {
            weight: Weight::HighPrecision(Parameter::Plain(weight.clone())),
            ..self.clone()
        }
    }

    /// The path in messages.
    fn shown_path(&self) -> &str {
        self.path().unwrap_or("without a path")
    }

    /// The same layer without gradients for its weight and bias; scaled parameters are not changed. Parameters in parts cannot be frozen:
    /// the layer then computes NaN.
    #[must_use]
    pub fn frozen(mut self) -> Self {
        self.bias.as_mut().map(freeze);
        if let Weight::HighPrecision(weight) = &mut self.weight {
            freeze(weight);
        }
        self
    }
}

path_methods!(Linear, state);

impl Fp8Layer for Linear {
    path_and_state!();

    fn roles(&self) -> &'static [Role] {
        &[Role::Input, Role::Weight, Role::GradOutput]
    }

    fn held_weight(&self) -> &Tensor {
        match &self.weight {
            Weight::HighPrecision(weight) => weight.tensor(),
            Weight::Fp8(weight) => weight.weight().held(),
        }
    }

    fn static_weight(&self) -> Option<&StaticWeight> {
        Linear::static_weight(self)
    }

    fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref().map(Parameter::tensor)
    }

    fn features(&self) -> (usize, usize) {
        Linear::features(self)
    }

    fn shards(&self) -> Option<Arc<LayerShards>> {
        self.shards.clone()
    }
}

impl Fp8Module for Linear {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.layer(self);
    }
}

/// Creates a linear layer with a bias, with candle-nn's initialization, or loads it. Where `vb` holds an FP8 weight
/// with its `weight_scale`, the layer keeps the codes only.
///
/// # Errors
/// If a tensor is missing or has another shape, or holds FP8 values without their scale.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8::nn;
///
/// # fn main() -> candle_core::Result<()> {
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let layer = nn::linear(64, 32, vb.pp("fc"))?;
/// assert_eq!(layer.path(), Some("fc")); // its name in reports, patterns and files
/// let x = Tensor::randn(0f32, 1., (8, 64), &Device::Cpu)?;
/// assert_eq!(layer.forward(&x)?.dims(), [8, 32]);
/// # Ok(()) }
/// ```
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> candle_core::Result<Linear> {
    linear_b(in_dim, out_dim, true, vb)
}

/// [`linear`] without a bias.
pub fn linear_no_bias(
    in_dim: usize,
    out_dim: usize,
    vb: VarBuilder<'_>,
) -> candle_core::Result<Linear> {
    linear_b(in_dim, out_dim, false, vb)
}

/// [`linear`] with or without a bias.
pub fn linear_b(
    in_dim: usize,
    out_dim: usize,
    bias: bool,
    vb: VarBuilder<'_>,
) -> candle_core::Result<Linear> {
    let path: Arc<str> = vb.prefix().into();
    if let Some(weight) = fp8_files::static_weight(out_dim, in_dim, &vb)? {
        let bias = if bias {
            Some(vb.get(out_dim, "bias")?)
        } else {
            None
        };
        return Ok(Linear::from_static(weight, bias, path));
    }
    let inner = candle_nn::linear_b(in_dim, out_dim, bias, vb.clone())?;
    fp8_files::refuse_codes(&vb, inner.weight())?;
    Ok(Linear::new(inner.weight().clone(), inner.bias().cloned()).with_path(path))
}
