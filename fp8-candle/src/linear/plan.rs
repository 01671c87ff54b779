//! What one call of a linear layer computes, and with which casts.

use super::cache::WeightCache;
use crate::packed::PackedWeight;
use crate::quantize::Quantizer;
use crate::tensor::Fp8Tensor;
use candle_core::Tensor;
use std::sync::Arc;

/// The casts of the operands of one GEMM, and its options.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct GemmPlan {
    /// Operand A: x, grad_output or grad_output, see [`crate::linear`].
    pub a: Quantizer,
    /// Operand B: weight, weight or x.
    pub b: Quantizer,
    /// Whether a device may accumulate with fewer bits than f32.
    pub use_fast_accum: bool,
}

impl GemmPlan {
    /// A GEMM of operands cast by `a` and `b`, accumulated in f32.
    pub fn new(a: Quantizer, b: Quantizer) -> Self {
        Self {
            a,
            b,
            use_fast_accum: false,
        }
    }

    /// The same GEMM with or without [`GemmPlan::use_fast_accum`].
    pub fn with_fast_accum(self, use_fast_accum: bool) -> Self {
        Self {
            use_fast_accum,
            ..self
        }
    }
}

/// How one call of a linear layer is computed. A GEMM without a plan runs in high precision.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct LinearPlan {
    /// Path of the layer, for messages.
    pub path: Arc<str>,
    /// `x weight^T`.
    pub output: Option<GemmPlan>,
    /// `grad_output weight`.
    pub grad_input: Option<GemmPlan>,
    /// `grad_output^T x`.
    pub grad_weight: Option<GemmPlan>,
    /// Whether to dequantize and multiply in f32 instead of calling the FP8 GEMM: the reference path.
    pub emulate: bool,
}

impl LinearPlan {
    /// A plan with all three GEMMs in high precision.
    pub fn new(path: impl Into<Arc<str>>) -> Self {
        Self {
            path: path.into(),
            output: None,
            grad_input: None,
            grad_weight: None,
            emulate: false,
        }
    }

    /// The same plan with another GEMM for the output.
    pub fn with_output(self, gemm: impl Into<Option<GemmPlan>>) -> Self {
        Self {
            output: gemm.into(),
            ..self
        }
    }

    /// The same plan with another GEMM for the gradient of the input.
    pub fn with_grad_input(self, gemm: impl Into<Option<GemmPlan>>) -> Self {
        Self {
            grad_input: gemm.into(),
            ..self
        }
    }

    /// The same plan with another GEMM for the gradient of the weight.
    pub fn with_grad_weight(self, gemm: impl Into<Option<GemmPlan>>) -> Self {
        Self {
            grad_weight: gemm.into(),
            ..self
        }
    }

    /// The same plan with or without [`LinearPlan::emulate`].
    pub fn with_emulate(self, emulate: bool) -> Self {
        Self { emulate, ..self }
    }
}

/// The weight of a linear layer.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum LinearWeight<'a> {
    /// High precision `[N, K]`, quantized in the call. A cache keeps the codes until the weight changes.
    HighPrecision(&'a Tensor, Option<&'a WeightCache>),
    /// Frozen FP8 `[N, K]`.
    Fp8(&'a Fp8Tensor),
    /// Frozen FP8 `[N, K]`, packed for its device.
    Packed(&'a PackedWeight),
}
