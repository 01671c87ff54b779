//! What one call of a linear layer computes, and with which casts.

use super::cache::WeightCache;
use crate::packed::PackedWeight;
use crate::quantize::Quantizer;
use crate::tensor::Fp8Tensor;
use candle_core::Tensor;
use std::sync::Arc;

/// The casts of one GEMM's operands and its options.
#[derive(Debug, Clone)]
pub struct GemmPlan {
    /// Operand A of the table above (x, grad_output, grad_output).
    pub a: Quantizer,
    /// Operand B (weight, weight, x).
    pub b: Quantizer,
    /// Let a device accumulate with fewer bits than f32.
    pub use_fast_accum: bool,
}

/// How one call of a linear layer computes. A GEMM without a plan runs in high precision.
#[derive(Debug, Clone)]
pub struct LinearPlan {
    /// Path of the layer, for messages.
    pub path: Arc<str>,
    /// `x weight^T`.
    pub output: Option<GemmPlan>,
    /// `grad_output weight`.
    pub grad_input: Option<GemmPlan>,
    /// `grad_output^T x`.
    pub grad_weight: Option<GemmPlan>,
    /// Dequantize and multiply in f32 instead of calling the FP8 GEMM: the reference path.
    pub emulate: bool,
}

/// The weight of a linear layer.
#[derive(Debug, Clone, Copy)]
pub enum LinearWeight<'a> {
    /// High precision `[N, K]`: quantized on the way, with a cache that holds the codes until the weight changes.
    HighPrecision(&'a Tensor, Option<&'a WeightCache>),
    /// Frozen FP8 `[N, K]`: used as it is.
    Fp8(&'a Fp8Tensor),
    /// Frozen FP8 `[N, K]`, laid out for its device.
    Packed(&'a PackedWeight),
}
