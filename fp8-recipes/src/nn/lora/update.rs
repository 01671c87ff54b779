//! The two matrices of an update, and what they add to a layer.

use super::LoraConfig;
use crate::error::Result;
use crate::module::show;
use crate::nn::Linear;
use crate::nn::scaled_parameter::{refuse_scaled, value_of};
use crate::nn::transformer::inputs::seed_at;
use crate::{Fp8Module, Visitor};
use candle_core::{D, DType, Tensor};
use candle_nn::{Init, VarBuilder};
use fp8_candle::ops;
use fp8_scaled::Parameter;
use std::sync::Arc;

/// What LoRA adds to the result of a linear layer: `factor (x A^T) B^T`, with A `[rank, in_features]` and B `[out_features, rank]`.
///
/// [`LoraLinear`](super::LoraLinear) is a layer with one such update; an update alone serves models that switch between several.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_nn::{VarBuilder, VarMap};
/// use fp8_recipes::nn::{LoraConfig, LoraUpdate, linear};
///
/// # fn main() -> fp8_recipes::Result<()> {
/// let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
/// let base = linear(16, 32, vb.pp("up"))?;
/// let update = LoraUpdate::new(base.features(), LoraConfig::new(4), vb.pp("up"))?;
/// let x = Tensor::randn(0f32, 1., (2, 5, 16), &Device::Cpu)?;
/// let y = base.forward(&x)?;
/// let tuned = update.add_to(&y, &x, None)?;
/// // B begins with zeros, so training begins with the base.
/// assert_eq!(tuned.to_vec3::<f32>()?, y.to_vec3::<f32>()?);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct LoraUpdate {
    a: Tensor,
    b: Tensor,
    config: LoraConfig,
    path: Arc<str>,
}

impl LoraUpdate {
    /// An update of a layer of (out_features, in_features), whose matrices are `lora_A.weight` and `lora_B.weight` of `vb`. A new A is
    /// drawn uniformly from +-1 / sqrt(in_features); a new B is zero.
    ///
    /// # Errors
    /// If the rank is 0, alpha is not finite, dropout is not a probability below 1, or a matrix has another shape;
    /// [`Error::NoScaledForm`](crate::Error::NoScaledForm) for matrices of a [`ScaledVarMap`](crate::scaled::ScaledVarMap).
    pub fn new(
        (out_features, in_features): (usize, usize),
        config: LoraConfig,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        let path = vb.prefix();
        config.check(&path)?;
        let bound = 1. / (in_features.max(1) as f64).sqrt();
        let init = Init::Uniform {
            lo: -bound,
            up: bound,
        };
        let a = vb.get_with_hints((config.rank, in_features), "lora_A.weight", init)?;
        let zeros = Init::Const(0.);
        let b = vb.get_with_hints((out_features, config.rank), "lora_B.weight", zeros)?;
        refuse_scaled("an update of low rank", &path, &[&a, &b])?;
        Ok(Self {
            a,
            b,
            config,
            path: path.into(),
        })
    }

    /// The same update under the path of its layer, where its variables have other names.
    #[must_use]
    pub fn with_path(self, path: impl Into<Arc<str>>) -> Self {
        Self {
            path: path.into(),
            ..self
        }
    }

    /// The path under which the matrices are shown.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// A and B.
    pub fn matrices(&self) -> [&Tensor; 2] {
        [&self.a, &self.b]
    }

    /// Rank, alpha and dropout.
    pub fn config(&self) -> LoraConfig {
        self.config
    }

    /// `y`, the layer's result for `x` `[.., in_features]`, with the update added, in y's dtype. The update is computed in the dtype of
    /// A, each row as it is alone. With a seed, as in training, it drops a share of its inputs: the seed and the path decide which.
    ///
    /// # Errors
    /// [`fp8_candle::Error::InFeatures`] if the last dimension of `x` is not in_features, [`fp8_candle::Error::Shape`] if `y` is not
    /// `[.., out_features]` with the other dimensions of `x`; those of candle.
    pub fn add_to(&self, y: &Tensor, x: &Tensor, dropout_seed: Option<u64>) -> Result<Tensor> {
        let _span = tracing::trace_span!("lora", path = self.path()).entered();
        self.check(y, x)?;
        let in_features = self.a.dim(D::Minus1)?;
        let mut inputs = x.to_dtype(self.a.dtype())?.reshape(((), in_features))?;
        if let Some(seed) = dropout_seed {
            let seed = seed_at(seed, &self.path, 0);
            inputs = ops::dropout(&inputs, f64::from(self.config.dropout), seed)?;
        }
        let update = ops::linear(&ops::linear(&inputs, &self.a, None)?, &self.b, None)?;
        let update = (update * self.config.factor())?.reshape(y.dims())?;
        Ok((y + update.to_dtype(y.dtype())?)?)
    }

    /// Checks the shapes, since a reshape would take any with as many elements, such as a transposed `x`.
    fn check(&self, y: &Tensor, x: &Tensor) -> Result<()> {
        let (out_features, in_features) = (self.b.dim(0)?, self.a.dim(D::Minus1)?);
        let got = x.dims().last().copied().unwrap_or(0);
        if got != in_features {
            return Err(fp8_candle::Error::InFeatures {
                path: self.path().to_string(),
                expected: in_features,
                got,
                shape: x.dims().to_vec(),
            }
            .into());
        }
        let mut expected = x.dims().to_vec();
        if let Some(last) = expected.last_mut() {
            *last = out_features;
        }
        if y.dims() != expected {
            return Err(fp8_candle::Error::Shape {
                op: "an update of low rank",
                what: "the layer's result",
                expected: format!("{expected:?}"),
                got: y.dims().to_vec(),
            }
            .into());
        }
        Ok(())
    }

    /// `base` with the update added to its weight, in f32 and detached: a layer in high precision under the base's path. The weight
    /// of an FP8 base is dequantized, and its input is no longer cast. Independent rows and rounded operands stay as they are in `base`.
    ///
    /// # Errors
    /// Those of candle.
    pub fn merged(&self, base: &Linear) -> Result<Linear> {
        let wide = |x: &Tensor| x.detach().to_dtype(DType::F32);
        let update = (wide(&self.b)?.matmul(&wide(&self.a)?)? * self.config.factor())?;
        let weight = (base.weight()?.to_dtype(DType::F32)? + update)?.detach();
        let bias = base.bias().map(Parameter::of);
        let bias = value_of(bias.as_ref(), DType::F32)?;
        let merged = Linear::new(weight, bias.as_ref().map(Tensor::detach)).with_products_of(base);
        Ok(match base.path() {
            Some(path) => merged.with_path(path),
            None => merged,
        })
    }
}

impl Fp8Module for LoraUpdate {
    fn visit(&self, visitor: &mut dyn Visitor) {
        show(visitor, Some(self.path()), "lora_A.weight", &self.a);
        show(visitor, Some(self.path()), "lora_B.weight", &self.b);
    }
}
