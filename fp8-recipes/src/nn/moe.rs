//! `candle_nn::moe`. Its kernels have no backward pass: where a gradient is tracked they are an error here.

use super::no_gradient_through;
use candle_core::quantized::QTensor;
use candle_core::{DType, Result, Tensor};

/// `candle_nn::moe::moe_gemm`, for inference.
///
/// # Errors
/// As candle-nn's, and if a gradient is tracked in one of the inputs.
pub fn moe_gemm(
    input: &Tensor,
    weights: &Tensor,
    topk_weights: &Option<Tensor>,
    sorted_token_ids: &Tensor,
    experts_ids: &Tensor,
    topk: usize,
    is_prefill: bool,
) -> Result<Tensor> {
    no_gradient_through("moe_gemm", &[input, weights])?;
    no_gradient_through("moe_gemm", &topk_weights.iter().collect::<Vec<_>>())?;
    candle_nn::moe::moe_gemm(
        input,
        weights,
        topk_weights,
        sorted_token_ids,
        experts_ids,
        topk,
        is_prefill,
    )
}

/// `candle_nn::moe::moe_gemm_gguf`, for inference.
///
/// # Errors
/// As candle-nn's, and if a gradient is tracked in one of the inputs.
#[allow(clippy::too_many_arguments)]
pub fn moe_gemm_gguf(
    input: &Tensor,
    weights: &QTensor,
    topk_weights: &Option<Tensor>,
    sorted_token_ids: &Tensor,
    experts_ids: &Tensor,
    topk: usize,
    is_prefill: bool,
    dtype: DType,
) -> Result<Tensor> {
    no_gradient_through("moe_gemm_gguf", &[input])?;
    no_gradient_through("moe_gemm_gguf", &topk_weights.iter().collect::<Vec<_>>())?;
    candle_nn::moe::moe_gemm_gguf(
        input,
        weights,
        topk_weights,
        sorted_token_ids,
        experts_ids,
        topk,
        is_prefill,
        dtype,
    )
}
