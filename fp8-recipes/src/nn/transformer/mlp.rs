//! The feed-forward network.

use super::block::{Block, missing};
use super::config::{TransformerConfig, unfit};
use super::inputs::LayerInputs;
use super::key_values::KeyValues;
use super::layer_norm_linear::norm;
use super::{LayerNorm, Linear};
use crate::array::{Array, Layer};
use crate::error::Result;
use crate::nn::linear::joint;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::ops::Activation;

/// The first projection of a feed-forward network.
///
/// ```
/// # use candle_core::{DType, Device};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn::*;
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let input = MlpInput::Up(linear(16, 64, vb.pp("up"))?);
/// # let _ = input;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone)]
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
#[derive(Debug, Clone)]
pub struct LayerNormMlp {
    norm: Option<LayerNorm>,
    input: MlpInput,
    down: Linear,
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

    /// A copy with or without [computing inner tensors again](TransformerConfig::with_recomputation).
    pub fn with_recomputation(self, recomputation: bool) -> Self {
        Self {
            recomputation,
            ..self
        }
    }

    /// A copy that is one node of the graph, or one node per layer.
    pub fn with_single_node(self, single_node: bool) -> Self {
        Self {
            single_node,
            ..self
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

    /// [`Module::forward`] with an error that can be matched.
    ///
    /// # Errors
    /// Those of its layers.
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        self.forward_array(x)
    }

    /// [`LayerNormMlp::try_forward`] on plain or scaled tensors.
    ///
    /// # Errors
    /// Those of its layers.
    pub fn forward_array<A: Array>(&self, x: &A) -> Result<A> {
        self.run(x, &LayerInputs::default())
    }
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

impl Module for LayerNormMlp {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.try_forward(x)?)
    }
}

impl Fp8Module for LayerNormMlp {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.norm.visit(visitor);
        for layer in self.input.layers() {
            layer.visit(visitor);
        }
        self.down.visit(visitor);
    }
}

/// A [`LayerNormMlp`] with the parameters `norm`, `up_proj` (for gated activations `gate_proj` and `up_proj`, or
/// `gate_up_proj`) and `down_proj`.
///
/// # Errors
/// If a tensor is missing or has another shape.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn::*;
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # let config = TransformerConfig::new(16, 2);
/// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let mlp = layer_norm_mlp(&config.with_hidden_act(ops::Activation::SwiGlu), vb)?;
/// assert!(vars.data().lock().unwrap().contains_key("gate_proj.weight"));
/// # let _ = (mlp, x);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
