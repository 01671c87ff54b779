//! A stand-in for the rest of a model after some layers.

use candle_core::{Result, Tensor};
use fp8::fp8_candle::wide::node;

/// A scalar whose gradient for `y` is `grad`. Nothing reads `y`, so a backward pass takes the time of what is before it.
pub fn gradient_from(y: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let end = Tensor::zeros((), grad.dtype(), grad.device())?;
    let grad = grad.clone();
    Ok(node("gradient-from", y, &end, move |_| Ok(grad.clone()))?)
}
