//! The weight of a linear layer between its forward and its backward pass.

use super::plan::LinearWeight;
use super::source::WeightSource;
use crate::cast::packed::PackedWeight;
use crate::cast::tensor::Fp8Tensor;
use candle_core::Tensor;
use std::sync::Arc;

/// A weight that a backward pass holds, outside any graph.
#[derive(Debug, Clone)]
pub(crate) enum HeldWeight {
    HighPrecision(Tensor),
    /// With K: [`LinearWeight::Kernel`].
    Kernel(Tensor, usize),
    Codes(Fp8Tensor),
    Packed(PackedWeight),
    Fetched(Arc<dyn WeightSource>),
}

impl HeldWeight {
    pub(crate) fn new(weight: LinearWeight<'_>) -> Self {
        match weight {
            LinearWeight::HighPrecision(weight, _) => Self::HighPrecision(weight.detach()),
            LinearWeight::Kernel {
                kernel,
                in_features,
                ..
            } => Self::Kernel(kernel.detach(), in_features),
            LinearWeight::Fp8(codes) => Self::Codes(codes.clone()),
            LinearWeight::Packed(packed) => Self::Packed(packed.clone()),
            LinearWeight::Fetched(source) => Self::Fetched(source.clone()),
        }
    }

    /// The tensor in high precision, in its own shape.
    pub(super) fn held(&self) -> Option<&Tensor> {
        match self {
            Self::HighPrecision(weight) | Self::Kernel(weight, _) => Some(weight),
            Self::Codes(_) | Self::Packed(_) | Self::Fetched(_) => None,
        }
    }
}
