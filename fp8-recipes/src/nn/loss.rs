//! `candle_nn::loss`, with a fused cross entropy.

pub use candle_nn::loss::*;

use candle_core::{Result, Tensor};

/// Mean of `-log softmax(inp)[target]`: `inp` `[n, classes]` of logits, `target` `[n]` of an integer dtype. A scalar of the
/// dtype of `inp`.
///
/// Forward and backward each read the logits once, and 16-bit logits are computed in f32.
///
/// # Errors
/// If shapes or devices are incompatible, or, on the CPU, a target is not a valid class index.
pub fn cross_entropy(inp: &Tensor, target: &Tensor) -> Result<Tensor> {
    fp8_candle::ops::cross_entropy(inp, target)?.to_dtype(inp.dtype())
}
