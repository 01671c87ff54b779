//! A layer's parameter, plain or scaled.

use super::error::Result;
use crate::var::ScaledVar;
use candle_core::{DType, Tensor};

/// A parameter in a layer: the constructor of the layer gets a tensor, and finds out once whether it is plain or the data of a
/// [`ScaledVar`].
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
}

impl Parameter {
    /// The scaled parameter whose data are `tensor`, or `tensor` itself. This looks `tensor` up in the registry of all scaled parameters, under a lock.
    pub fn of(tensor: &Tensor) -> Self {
        match ScaledVar::of(tensor) {
            Some(var) => Self::Scaled(var),
            None => Self::Plain(tensor.clone()),
        }
    }

    /// The plain tensor, or the data of a scaled parameter, whose values are the data times the scale.
    pub fn tensor(&self) -> &Tensor {
        match self {
            Self::Plain(tensor) => tensor,
            Self::Scaled(var) => var.data_var(),
        }
    }

    /// The scaled parameter, None for a plain tensor.
    pub fn scaled(&self) -> Option<&ScaledVar> {
        match self {
            Self::Plain(_) => None,
            Self::Scaled(var) => Some(var),
        }
    }

    /// The operand for a product with a plain tensor: a plain parameter in its own dtype, or the value of a scaled one in `dtype`
    /// (f32, bf16, f16 or f64). No gradient reaches a scaled parameter through it.
    ///
    /// # Errors
    /// If a device fails.
    pub fn value(&self, dtype: DType) -> Result<Tensor> {
        match self {
            Self::Plain(tensor) => Ok(tensor.clone()),
            Self::Scaled(var) => var.value().to_tensor(dtype),
        }
    }
}
