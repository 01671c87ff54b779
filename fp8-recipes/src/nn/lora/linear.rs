//! A frozen linear layer with a trainable update of low rank.

use super::{LoraConfig, LoraUpdate};
use crate::error::Result;
use crate::nn::Linear;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Tensor};
use candle_nn::VarBuilder;

/// `y = base(x) + alpha / rank (x A^T) B^T` with a frozen base: LoRA.
///
/// The base holds FP8 codes from a file or a weight in high precision. It gets no gradient either way; gradients pass through it
/// to x. A `[rank, in_features]` and B `[out_features, rank]` are trained in their own dtype, under any guard. Checkpoints hold
/// them as `lora_A.weight` and `lora_B.weight` under their path, as in PEFT.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_recipes::nn::{LoraConfig, LoraLinear, linear};
///
/// # fn main() -> fp8_recipes::Result<()> {
/// // The base may come from a file as well: from `load::var_builder`.
/// let frozen = VarMap::new();
/// let base = linear(16, 32, VarBuilder::from_varmap(&frozen, DType::F32, &Device::Cpu).pp("up"))?;
/// let adapters = VarMap::new();
/// let vb = VarBuilder::from_varmap(&adapters, DType::F32, &Device::Cpu).pp("up");
/// let layer = LoraLinear::new(base.clone(), LoraConfig::new(4).with_alpha(8.), vb)?;
/// let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// // B begins with zeros, so training begins with the base.
/// assert_eq!(layer.forward(&x)?.to_vec3::<f32>()?, base.forward(&x)?.to_vec3::<f32>()?);
/// let merged = layer.merge()?; // a plain layer again
/// assert_eq!(merged.path(), Some("up"));
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct LoraLinear {
    base: Linear,
    update: LoraUpdate,
}

impl LoraLinear {
    /// An update of `base`, whose matrices are `lora_A.weight` and `lora_B.weight` of `vb`: [`LoraUpdate::new`].
    ///
    /// # Errors
    /// As [`LoraUpdate::new`].
    pub fn new(base: Linear, config: LoraConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let update = LoraUpdate::new(base.features(), config, vb)?;
        Ok(Self {
            base: base.frozen(),
            update,
        })
    }

    /// The layer that is not trained.
    pub fn base(&self) -> &Linear {
        &self.base
    }

    /// A `[rank, in_features]` and B `[out_features, rank]`.
    pub fn adapters(&self) -> [&Tensor; 2] {
        self.update.matrices()
    }

    /// Rank, alpha and dropout.
    pub fn config(&self) -> LoraConfig {
        self.update.config()
    }

    /// The forward pass, x `[.., in_features]` to `[.., out_features]` of x's dtype; with `train`, with dropout, which differs from
    /// call to call.
    ///
    /// # Errors
    /// As [`Linear::try_forward`].
    pub fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.base.try_forward(x)?;
        self.update.add_to(&y, x, train.then(rand::random))
    }

    /// The base with the update added to its weight, in f32 and detached: a layer in high precision under the base's path, which
    /// can be calibrated and exported. The weight of an FP8 base is dequantized, and its input is no longer cast.
    ///
    /// # Errors
    /// Those of candle.
    pub fn merge(&self) -> Result<Linear> {
        self.update.merged(&self.base)
    }
}

impl Module for LoraLinear {
    /// [`LoraLinear::forward_t`] without dropout.
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        Ok(self.forward_t(x, false)?)
    }
}

impl Fp8Module for LoraLinear {
    fn visit(&self, visitor: &mut dyn Visitor) {
        self.base.visit(visitor);
        self.update.visit(visitor);
    }
}
