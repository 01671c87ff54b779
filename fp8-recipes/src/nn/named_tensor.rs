//! A named tensor outside the layers of this module.

use crate::{Fp8Module, Visitor};
use candle_core::Tensor;

/// A parameter that is not part of a layer of this module, with its checkpoint name.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Tensor};
/// use fp8::nn::NamedTensor;
///
/// # fn main() -> candle_core::Result<()> {
/// let gain = NamedTensor::new("blocks.0.gain", Tensor::ones(4, DType::F32, &Device::Cpu)?);
/// assert_eq!(gain.tensor().dims(), [4]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct NamedTensor {
    path: String,
    tensor: Tensor,
}

impl NamedTensor {
    /// Names `tensor`; `path` is its full name in the checkpoint.
    pub fn new(path: impl Into<String>, tensor: Tensor) -> Self {
        Self {
            path: path.into(),
            tensor,
        }
    }

    /// Full name in the checkpoint.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The value.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }
}

impl Fp8Module for NamedTensor {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.tensor(Some(&self.path), &self.tensor);
    }
}
