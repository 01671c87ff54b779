//! Operators without a GEMM of their own, whose tensors a recipe may cast.

use crate::autocast::Fp8State;
use candle_core::Device;
use std::sync::Arc;

/// What a layer or operator computes.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{Fp8Operator, LayerKind, nn};
/// assert_eq!(nn::Matmul::new("scores").kind(), LayerKind::Matmul);
/// assert_eq!(LayerKind::LayerNorm.to_string(), "layer norm");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LayerKind {
    /// `x weight^T + bias`.
    Linear,
    /// A convolution, transposed or not.
    Convolution,
    /// Several products, each with its own part of input and kernel: [`nn::DenseGeneral`](crate::nn::DenseGeneral) with batch axes.
    BatchedLinear,
    /// Rows of a table.
    Embedding,
    /// Layer norm.
    LayerNorm,
    /// Root-mean-square norm.
    RmsNorm,
    /// The product of two activations.
    Matmul,
    /// The sum of two activations.
    Add,
    /// The elementwise product of two activations.
    Mul,
    /// The elementwise quotient of two activations.
    Div,
}

impl LayerKind {
    /// Whether it has a weight that its GEMMs take in FP8.
    pub(crate) fn multiplies(self) -> bool {
        matches!(self, Self::Linear | Self::Convolution | Self::BatchedLinear)
    }
}

names! { LayerKind::name:
    Linear = "linear",
    Convolution = "convolution",
    BatchedLinear = "batched linear",
    Embedding = "embedding",
    LayerNorm = "layer norm",
    RmsNorm = "rms norm",
    Matmul = "matmul",
    Add = "add",
    Mul = "mul",
    Div = "div",
}

/// An operator that computes in high precision: an embedding, a norm, [`nn::Matmul`](crate::nn::Matmul), .. Its tensors are cast
/// before and after if the recipe casts operators ([`Fp8LinearConfig::cast_operators`](crate::config::Fp8LinearConfig)) and
/// [`PrepareOptions::with_operators`](crate::PrepareOptions::with_operators) has prepared it.
pub trait Fp8Operator {
    /// Path in the checkpoint, or a name for an operator without tensors; None if it has neither.
    fn path(&self) -> Option<&str>;

    /// What it computes.
    fn kind(&self) -> LayerKind;

    /// The device of its tensors; None without tensors.
    fn device(&self) -> Option<&Device>;

    /// FP8 state, if the operator is prepared.
    fn fp8_state(&self) -> Option<Arc<Fp8State>>;

    /// Sets or removes the FP8 state of this operator and all its clones. Once removed, guards treat the operator as left out on
    /// purpose.
    fn set_fp8_state(&self, state: Option<Arc<Fp8State>>);
}
