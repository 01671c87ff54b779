//! Operators without a GEMM of their own, whose tensors a recipe may cast.

use crate::autocast::Fp8State;
use candle_core::Device;
use std::fmt;
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
        matches!(self, Self::Linear | Self::Convolution)
    }
}

impl fmt::Display for LayerKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Linear => "linear",
            Self::Convolution => "convolution",
            Self::Embedding => "embedding",
            Self::LayerNorm => "layer norm",
            Self::RmsNorm => "rms norm",
            Self::Matmul => "matmul",
            Self::Add => "add",
            Self::Mul => "mul",
            Self::Div => "div",
        })
    }
}

/// An operator that computes in high precision: an embedding, a norm, [`nn::Matmul`](crate::nn::Matmul), .. Its tensors are cast
/// before and after if the recipe casts operators ([`Fp8LinearConfig::cast_operators`](crate::config::Fp8LinearConfig)) and
/// [`PrepareOptions::with_operators`](crate::PrepareOptions::with_operators) has prepared it.
///
/// ```
/// # use fp8_recipes as fp8;
/// use fp8::{Fp8Operator, nn};
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let operator: &dyn Fp8Operator = &nn::Matmul::new("attention.scores");
/// let named = format!("{} {}", operator.kind(), operator.path().unwrap_or("?"));
/// assert_eq!(named, "matmul attention.scores");
/// # Ok(()) }
/// ```
pub trait Fp8Operator {
    /// Path in the checkpoint, or a name for an operator without tensors; None if it has neither.
    fn path(&self) -> Option<&str>;

    /// What it computes.
    fn kind(&self) -> LayerKind;

    /// The device of its tensors; None without tensors.
    fn device(&self) -> Option<&Device>;

    /// FP8 state, if the operator is prepared.
    fn fp8_state(&self) -> Option<Arc<Fp8State>>;

    /// Gives or takes away FP8 state, for this operator and all clones of it.
    fn set_fp8_state(&self, state: Option<Arc<Fp8State>>);
}
