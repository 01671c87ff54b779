//! The feed-forward network.

use super::block::{Block, calls, missing};
use super::config::{TransformerConfig, unfit};
use super::inputs::LayerInputs;
use super::key_values::KeyValues;
use super::layer_norm_linear::norm;
use super::{LayerNorm, Linear};
use crate::Fp8Module;
use crate::array::{Array, Layer};
use crate::error::Result;
use crate::nn::linear::joint;
use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::ops::Activation;
use fp8_core::setters;

/// The first projection of a feed-forward network.
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
#[non_exhaustive]
pub enum MlpInput {
    /// One layer, with twice the features, the gate first, if the activation is gated.
    Up(Linear),
    /// Gate and value of a gated activation.
    GateUp {
        /// The gate.
        gate: Linear,
        /// The value.
        up: Linear,
    },
}

impl MlpInput {
    fn layers(&self) -> Vec<&Linear> {
        match self {
            Self::Up(up) => vec![up],
            Self::GateUp { gate, up } => vec![gate, up],
        }
    }
}

/// A feed-forward network, with or without a norm before it, as one node: `down(activation(up(norm(x))))`.
///
/// ```
/// # use fp8_recipes as fp8;
/// use candle_core::{Device, Tensor};
/// use fp8::nn::{Linear, LayerNormMlp, MlpInput, Module, ops::Activation};
/// # fn main() -> candle_core::Result<()> {
/// let weight = |out, input| Ok::<_, candle_core::Error>(Linear::new(Tensor::randn(0f32, 1., (out, input), &Device::Cpu)?, None));
/// let input = MlpInput::GateUp { gate: weight(32, 8)?, up: weight(32, 8)? };
/// let mlp = LayerNormMlp::new(None, input, weight(8, 32)?, Activation::SwiGlu);
/// assert_eq!(mlp.forward(&Tensor::randn(0f32, 1., (2, 3, 8), &Device::Cpu)?)?.dims(), [2, 3, 8]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone, Fp8Module)]
#[fp8(crate = "crate")]
pub struct LayerNormMlp {
    norm: Option<LayerNorm>,
    input: MlpInput,
    down: Linear,
    #[fp8(skip)]
    activation: Activation,
    recomputation: bool,
    single_node: bool,
}

impl LayerNormMlp {
    /// A network of these layers.
    pub fn new(
        norm: impl Into<Option<LayerNorm>>,
        input: MlpInput,
        down: Linear,
        activation: Activation,
    ) -> Self {
        Self {
            norm: norm.into(),
            input,
            down,
            activation,
            recomputation: false,
            single_node: true,
        }
    }

    /// The norm, if it has one.
    pub fn norm(&self) -> Option<&LayerNorm> {
        self.norm.as_ref()
    }

    /// The first projection.
    pub fn input(&self) -> &MlpInput {
        &self.input
    }

    /// The second projection.
    pub fn down(&self) -> &Linear {
        &self.down
    }

    /// The activation between the projections.
    pub fn activation(&self) -> Activation {
        self.activation
    }

    /// Fails unless the activation can read these projections.
    fn check(&self, features: usize) -> Result<()> {
        let path = |layer: &Linear| layer.path().unwrap_or_default().to_string();
        let activation = self.activation;
        match &self.input {
            MlpInput::GateUp { gate, .. } if !activation.is_gated() => Err(unfit(
                &path(gate),
                "the activation",
                activation,
                "a gated one, since gate and value have a layer each",
            )),
            MlpInput::Up(up) if activation.is_gated() && !features.is_multiple_of(2) => Err(unfit(
                &path(up),
                "the number of features",
                features,
                format!("an even one: {activation} reads gate and value from it"),
            )),
            _ => Ok(()),
        }
    }
}

calls!(features LayerNormMlp);

setters! { LayerNormMlp:
    /// A copy with or without [computing inner tensors again](TransformerConfig::with_recomputation).
    with_recomputation(recomputation: bool);
}

impl Block for LayerNormMlp {
    const NAME: &'static str = "layer-norm-mlp";

    fn norms(&self) -> Vec<&LayerNorm> {
        self.norm.iter().collect()
    }

    fn linears(&self) -> Vec<&Linear> {
        self.input
            .layers()
            .into_iter()
            .chain([&self.down])
            .collect()
    }

    fn wants_single_node(&self) -> bool {
        self.single_node
    }

    fn recomputes(&self) -> bool {
        self.recomputation
    }

    fn body<A: Array>(
        &self,
        x: &A,
        _: &LayerInputs<'_>,
        _: Option<&mut KeyValues<A>>,
    ) -> Result<A> {
        let hidden = joint(&self.input.layers(), &self.norm.apply(x)?)?;
        let features = hidden.first().and_then(|x| x.dims().last());
        self.check(features.copied().unwrap_or(0))?;
        let hidden = match hidden.as_slice() {
            [gate, value] => gate.gated_activation(value, self.activation)?,
            [hidden] => hidden.activation(self.activation)?,
            _ => return missing("an MLP without a projection"),
        };
        self.down.apply(&hidden)
    }
}

/// A [`LayerNormMlp`] with the parameters `norm`, `up_proj` (for gated activations `gate_proj` and `up_proj`, or
/// `gate_up_proj`) and `down_proj`.
///
/// # Errors
/// If a tensor is missing or has another shape.
pub fn layer_norm_mlp(
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<LayerNormMlp> {
    let norm = norm(config.hidden_size, config, vb.pp("norm"))?;
    mlp(Some(norm), config, vb)
}

/// The projections under `vb`, after `norm`.
pub(super) fn mlp(
    norm: Option<LayerNorm>,
    config: &TransformerConfig,
    vb: VarBuilder<'_>,
) -> candle_core::Result<LayerNormMlp> {
    let (d, n) = (config.hidden_size, config.intermediate_size);
    let linear = |input, out, name| crate::nn::linear_b(input, out, config.bias, vb.pp(name));
    let gated = config.hidden_act.is_gated();
    let input = match (gated, config.fused_gate_up) {
        (false, _) => MlpInput::Up(linear(d, n, "up_proj")?),
        (true, true) => MlpInput::Up(linear(d, 2 * n, "gate_up_proj")?),
        (true, false) => MlpInput::GateUp {
            gate: linear(d, n, "gate_proj")?,
            up: linear(d, n, "up_proj")?,
        },
    };
    let down = linear(n, d, "down_proj")?;
    Ok(LayerNormMlp::new(norm, input, down, config.hidden_act)
        .with_recomputation(config.recomputation))
}
