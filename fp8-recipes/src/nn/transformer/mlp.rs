//! The feed-forward network.

use super::config::TransformerConfig;
use super::layer_norm_linear::norm;
use super::node;
use super::{LayerNorm, Linear, Wide, WideNode};
use crate::error::Result;
use crate::scaled::{Array, Layer};
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::ops::Activation;

/// The first projection of a feed-forward network.
///
/// ```
/// # use candle_core::{DType, Device, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// # use fp8_recipes::nn::*;
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// # let config = TransformerConfig::new(16, 2);
/// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
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
/// use candle_core::{DType, Device, Tensor};
/// use fp8_recipes::nn::{Linear, LayerNormMlp, MlpInput, Module, ops::Activation};
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
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// let input = MlpInput::Up(linear(16, 64, vb.pp("up"))?);
    /// let mlp = LayerNormMlp::new(None, input, linear(64, 16, vb.pp("down"))?, ops::Activation::Gelu);
    /// assert_eq!(mlp.forward(&x)?.dims(), [2, 5, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// The same with or without [computing inner tensors again](TransformerConfig::with_recomputation).
    pub fn with_recomputation(self, recomputation: bool) -> Self {
        Self {
            recomputation,
            ..self
        }
    }

    /// The same module as one node of the graph, or as a node per layer.
    pub fn with_single_node(self, single_node: bool) -> Self {
        Self {
            single_node,
            ..self
        }
    }

    /// The norm, if it has one.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let mlp = layer_norm_mlp(&config, vb)?;
    /// assert!(mlp.norm().is_some());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn norm(&self) -> Option<&LayerNorm> {
        self.norm.as_ref()
    }

    /// The first projection.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let mlp = layer_norm_mlp(&config, vb)?;
    /// assert!(matches!(mlp.input(), MlpInput::Up(_)));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn input(&self) -> &MlpInput {
        &self.input
    }

    /// The second projection.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let mlp = layer_norm_mlp(&config, vb)?;
    /// assert_eq!(mlp.down().features(), (16, 64));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn down(&self) -> &Linear {
        &self.down
    }

    /// Between the projections.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let mlp = layer_norm_mlp(&config, vb)?;
    /// assert_eq!(mlp.activation(), ops::Activation::Gelu);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn activation(&self) -> Activation {
        self.activation
    }

    pub(super) fn recomputes(&self) -> bool {
        self.recomputation
    }

    pub(super) fn fits(&self) -> bool {
        let linears = self.input.layers().into_iter().chain([&self.down]);
        self.single_node && node::fits(&self.norm, linears)
    }

    pub(super) fn in_node(&self, node: &mut WideNode, x: &Wide) -> Result<Wide> {
        let normed = match &self.norm {
            Some(layer) => node::norm(node, layer, x)?,
            None => x.clone(),
        };
        let mut hidden = node::linears(node, &self.input.layers(), &normed)?.into_iter();
        let hidden = match (hidden.next(), hidden.next()) {
            (Some(gate), Some(up)) => node.gated_activation(&gate, &up, self.activation)?,
            (Some(hidden), None) => node.activation(&hidden, self.activation)?,
            _ => return Err(candle_core::Error::Msg("an MLP without a projection".into()).into()),
        };
        node::linear(node, &self.down, &hidden)
    }

    pub(super) fn composed<A: Array>(&self, x: &A) -> Result<A> {
        let normed = match &self.norm {
            Some(norm) => norm.apply(x)?,
            None => x.clone(),
        };
        let hidden = match &self.input {
            MlpInput::Up(up) => {
                let hidden = up.apply(&normed)?;
                match self.activation.is_gated() {
                    false => curve(self.activation, &hidden)?,
                    true => {
                        let last = hidden.dims().len().saturating_sub(1);
                        let n = hidden.dims().last().copied().unwrap_or(0) / 2;
                        let gate = hidden.narrow(last, 0, n)?.contiguous()?;
                        let value = hidden.narrow(last, n, n)?.contiguous()?;
                        curve(self.activation, &gate)?.mul(&value)?
                    }
                }
            }
            MlpInput::GateUp { gate, up } => {
                curve(self.activation, &gate.apply(&normed)?)?.mul(&up.apply(&normed)?)?
            }
        };
        self.down.apply(&hidden)
    }

    /// [`Module::forward`] with an error that can be matched.
    ///
    /// # Errors
    /// Those of its layers.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let mlp = layer_norm_mlp(&config, vb)?;
    /// assert_eq!(mlp.try_forward(&x)?.dims(), [2, 5, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn try_forward(&self, x: &Tensor) -> Result<Tensor> {
        if !self.fits() {
            return self.composed(x);
        }
        node::run("layer-norm-mlp", self.recomputation, x, |node, x| {
            self.in_node(node, x)
        })
    }

    /// [`LayerNormMlp::try_forward`] on plain or scaled tensors.
    ///
    /// # Errors
    /// Those of its layers.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use fp8_recipes::nn::*;
    /// # let vars = VarMap::new();
    /// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
    /// # let config = TransformerConfig::new(16, 2);
    /// # let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
    /// # let mlp = layer_norm_mlp(&config, vb)?;
    /// let y: Tensor = mlp.forward_array(&x)?;
    /// assert_eq!(y.dims(), [2, 5, 16]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn forward_array<A: Array>(&self, x: &A) -> Result<A> {
        match x.as_tensor() {
            Some(x) => A::from_tensor(self.try_forward(x)?),
            None => self.composed(x),
        }
    }
}

/// The function of the gate, or of all features if there is none.
fn curve<A: Array>(activation: Activation, x: &A) -> Result<A> {
    match activation {
        Activation::Gelu | Activation::GeGlu => x.gelu(),
        Activation::QuickGelu | Activation::QuickGeGlu => x.mul(&x.mul_constant(1.702)?.sigmoid()?),
        Activation::Relu | Activation::ReGlu => x.relu(),
        Activation::SquaredRelu | Activation::SquaredReGlu => x.relu()?.square(),
        Activation::Silu | Activation::SwiGlu => x.silu(),
        Activation::Glu => x.sigmoid(),
        other => Err(candle_core::Error::Msg(format!("{other} has no composed form")).into()),
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

/// The projections under `vb`, behind `norm`.
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
