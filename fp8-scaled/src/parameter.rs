//! A layer's parameter: plain, scaled, or in parts on several ranks.

use super::error::Result;
use crate::var::ScaledVar;
use candle_core::{DType, Tensor};
use fp8_ranks::ShardedVar;

/// A parameter in a layer: the constructor of the layer gets a tensor, and finds out once whether it is plain, the data of a
/// [`ScaledVar`] or the placeholder of a [`ShardedVar`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_scaled::{Parameter, ScaledVar};
/// let x = Tensor::new(&[0.02f32, -0.05], &Device::Cpu)?;
/// let var = ScaledVar::rescaled("w", &x, DType::F16)?;
/// let scaled = Parameter::of(var.data_var());
/// assert!(scaled.scaled().is_some() && Parameter::of(&x).scaled().is_none());
/// assert!((scaled.value(DType::F32)?.to_vec1::<f32>()?[1] + 0.05).abs() < 1e-4);
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
#[derive(Debug, Clone)]
pub enum Parameter {
    /// A tensor whose elements are the values.
    Plain(Tensor),
    /// A parameter of scaled arithmetic.
    Scaled(ScaledVar),
    /// A parameter of which each rank holds a part.
    Sharded(ShardedVar),
}

impl Parameter {
    /// The scaled parameter whose data are `tensor`, the parameter in parts whose placeholder it is, or `tensor` itself. This looks
    /// `tensor` up in the registries of all such parameters, under locks.
    pub fn of(tensor: &Tensor) -> Self {
        match (ScaledVar::of(tensor), ShardedVar::of(tensor)) {
            (Some(var), _) => Self::Scaled(var),
            (None, Some(var)) => Self::Sharded(var),
            (None, None) => Self::Plain(tensor.clone()),
        }
    }

    /// [`Parameter::of`], for the constructor of a layer that computes with [`Parameter::value`] only: a parameter in parts learns that
    /// it is gathered.
    pub fn gathered(tensor: &Tensor) -> Self {
        let parameter = Self::of(tensor);
        if let Self::Sharded(var) = &parameter {
            var.claim();
        }
        parameter
    }

    /// The plain tensor; the data of a scaled parameter, whose values are the data times the scale; or the placeholder of a parameter in
    /// parts, which has its shape and NaN for values.
    pub fn tensor(&self) -> &Tensor {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Scaled(var) => var.data_var(),
            Self::Sharded(var) => var.placeholder(),
        }
    }

    /// The variable that an optimizer changes, if this is one: the plain tensor, the data, or this rank's part.
    pub fn variable(&self) -> &Tensor {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Scaled(var) => var.data_var(),
            Self::Sharded(var) => var.shard(),
        }
    }

    /// The parameter in parts, else None.
    pub fn sharded(&self) -> Option<&ShardedVar> {
        match self {
            Self::Sharded(var) => Some(var),
            _ => None,
        }
    }

    /// The scaled parameter, else None.
    pub fn scaled(&self) -> Option<&ScaledVar> {
        match self {
            Self::Scaled(var) => Some(var),
            _ => None,
        }
    }

    /// The operand for a product with a plain tensor: a plain parameter in its own dtype, or the value of a scaled one in `dtype`
    /// (f32, bf16, f16 or f64). No gradient reaches a scaled parameter through it. A parameter in parts is gathered, in f32, which all
    /// ranks do at the same time; its gradient goes back to the parts.
    ///
    /// # Errors
    /// If a device or a group of ranks fails.
    pub fn value(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Plain(tensor) => Ok(tensor.clone()),
            Self::Scaled(var) => var.value().to_tensor(dtype),
            Self::Sharded(var) => Ok(var.value()?),
        }
    }
}
