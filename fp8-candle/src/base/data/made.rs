//! Matrices that a cast computes from others instead of reading them.

use super::codes::Codes;
use super::matrix_dims;
use crate::base::activation::Activation;
use candle_core::{DType, Tensor};

/// The matrix to cast. All tensors are contiguous, of one float dtype and on one device. Values are rounded to that dtype
/// before the cast.
#[derive(Clone, Copy)]
pub(crate) enum Made<'a> {
    /// A tensor.
    Stored(&'a Tensor),
    /// LayerNorm (`center`) or RMSNorm over the last dimension.
    Norm {
        center: bool,
        x: &'a Tensor,
        weight: &'a Tensor,
        bias: Option<&'a Tensor>,
        eps: f64,
    },
    /// The result of an activation for `x`.
    Activation {
        activation: Activation,
        x: &'a Tensor,
    },
    /// The gradient of `x` of an activation whose result has the gradient `grad`.
    ActivationGradient {
        activation: Activation,
        x: &'a Tensor,
        grad: &'a Tensor,
    },
}

impl Made<'_> {
    /// A tensor whose dtype and device are those of the result.
    pub(crate) fn like(&self) -> &Tensor {
        match self {
            Self::Stored(x)
            | Self::Norm { x, .. }
            | Self::Activation { x, .. }
            | Self::ActivationGradient { x, .. } => x,
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.like().dtype()
    }

    /// The shape of the result.
    pub(crate) fn dims(&self) -> Vec<usize> {
        let dims = self.like().dims();
        match self {
            Self::Activation { activation, .. } => activation.result_dims(dims),
            _ => dims.to_vec(),
        }
    }

    /// The result as a matrix.
    pub(crate) fn matrix(&self) -> (usize, usize) {
        matrix_dims(&self.dims())
    }

    /// Every tensor that is read.
    pub(crate) fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        let tensors = match *self {
            Self::Stored(x) | Self::Activation { x, .. } => [Some(x), None, None],
            Self::Norm {
                x, weight, bias, ..
            } => [Some(x), Some(weight), bias],
            Self::ActivationGradient { x, grad, .. } => [Some(x), Some(grad), None],
        };
        tensors.into_iter().flatten()
    }
}

/// The result of a cast of a [`Made`].
pub(crate) struct MadeCast {
    pub(crate) codes: Codes,
    /// f32 `[1]`, if it was measured.
    pub(crate) amax: Option<Tensor>,
    /// `[cols]`, the sums over rows of the values that were cast, before the cast; if asked for.
    pub(crate) sums: Option<Tensor>,
}
