//! A frozen linear layer with a trainable update of low rank.

use super::Linear;
use super::transformer::config::{check_dropout, unfit};
use crate::error::Result;
use crate::module::show;
use crate::{Fp8Module, Visitor};
use candle_core::{DType, Module, Tensor};
use candle_nn::{Init, VarBuilder};

/// Rank, weight and dropout of the update of a [`LoraLinear`].
///
/// ```
/// use fp8_recipes::nn::LoraConfig;
/// let config = LoraConfig::new(8).with_alpha(16.).with_dropout(0.05);
/// assert_eq!(config.alpha / config.rank as f64, 2.);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct LoraConfig {
    /// Features between the two matrices.
    pub rank: usize,
    /// The update is multiplied by `alpha / rank`; by default it is the rank.
    pub alpha: f64,
    /// The share of the update's inputs that [`LoraLinear::forward_t`] drops in training.
    pub dropout: f32,
}

impl LoraConfig {
    /// An update of this rank, multiplied by 1, without dropout.
    pub fn new(rank: usize) -> Self {
        Self {
            rank,
            alpha: rank as f64,
            dropout: 0.,
        }
    }

    fn check(&self, path: &str) -> Result<()> {
        if self.rank == 0 {
            return Err(unfit(path, "LoraConfig::rank", 0, "at least 1"));
        }
        if !self.alpha.is_finite() {
            let expected = "a finite number";
            return Err(unfit(path, "LoraConfig::alpha", self.alpha, expected));
        }
        check_dropout(path, "LoraConfig::dropout", self.dropout)
    }
}

setters! { LoraConfig:
    with_alpha(alpha: f64);
    with_dropout(dropout: f32);
}

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
    a: Tensor,
    b: Tensor,
    config: LoraConfig,
    path: String,
}

impl LoraLinear {
    /// An update of `base`, whose matrices are `lora_A.weight` and `lora_B.weight` of `vb`. A new A is drawn uniformly from +-1 /
    /// sqrt(in_features); a new B is zero.
    ///
    /// # Errors
    /// If the rank is 0, alpha is not finite, dropout is not a probability below 1, or a matrix has another shape.
    pub fn new(base: Linear, config: LoraConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let path = vb.prefix();
        config.check(&path)?;
        let (out_features, in_features) = base.features();
        let bound = 1. / (in_features.max(1) as f64).sqrt();
        let init = Init::Uniform {
            lo: -bound,
            up: bound,
        };
        let a = vb.get_with_hints((config.rank, in_features), "lora_A.weight", init)?;
        let zeros = Init::Const(0.);
        let b = vb.get_with_hints((out_features, config.rank), "lora_B.weight", zeros)?;
        Ok(Self {
            base: base.frozen(),
            a,
            b,
            config,
            path,
        })
    }

    /// The layer that is not trained.
    pub fn base(&self) -> &Linear {
        &self.base
    }

    /// A `[rank, in_features]` and B `[out_features, rank]`.
    pub fn adapters(&self) -> [&Tensor; 2] {
        [&self.a, &self.b]
    }

    /// Rank, alpha and dropout.
    pub fn config(&self) -> LoraConfig {
        self.config
    }

    /// The forward pass, x `[.., in_features]` to `[.., out_features]` of x's dtype; with `train`, with dropout.
    ///
    /// # Errors
    /// As [`Linear::try_forward`].
    pub fn forward_t(&self, x: &Tensor, train: bool) -> Result<Tensor> {
        let y = self.base.try_forward(x)?;
        let mut update = x.to_dtype(self.a.dtype())?;
        if train && self.config.dropout > 0. {
            update = candle_nn::ops::dropout(&update, self.config.dropout)?;
        }
        let in_features = self.base.features().1;
        let update = (update.reshape(((), in_features))?)
            .matmul(&self.a.t()?)?
            .matmul(&self.b.t()?)?;
        let update = (update * self.factor())?.reshape(y.dims())?;
        Ok((y + update.to_dtype(x.dtype())?)?)
    }

    fn factor(&self) -> f64 {
        self.config.alpha / self.config.rank as f64
    }

    /// The base with the update added to its weight, in f32 and detached: a layer in high precision under the base's path, which
    /// can be calibrated and exported. The weight of an FP8 base is dequantized, and its input is no longer cast.
    ///
    /// # Errors
    /// Those of candle.
    pub fn merge(&self) -> Result<Linear> {
        let wide = |x: &Tensor| x.detach().to_dtype(DType::F32);
        let update = (wide(&self.b)?.matmul(&wide(&self.a)?)? * self.factor())?;
        let weight = (self.base.weight()?.to_dtype(DType::F32)? + update)?.detach();
        let merged = Linear::new(weight, self.base.bias().map(Tensor::detach));
        Ok(match self.base.path() {
            Some(path) => merged.with_path(path),
            None => merged,
        })
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
        show(visitor, Some(self.path.as_str()), "lora_A.weight", &self.a);
        show(visitor, Some(self.path.as_str()), "lora_B.weight", &self.b);
    }
}
