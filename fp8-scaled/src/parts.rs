//! Between scaled tensors and the loops over their data.

use super::error::Result;
use super::kernels::times;
use super::value::Scaled;
use candle_core::Tensor;
use fp8_core::scaled::Factored;

/// Float data with what a value of them is multiplied by; zeros and 1 for a tensor of no size. For functions that are not
/// homogeneous.
pub(super) fn sized(x: &Scaled) -> Result<(Tensor, f64)> {
    let data = x.data()?;
    match x.scale().is_zero() {
        true => Ok((data.zeros_like()?, 1.0)),
        false => Ok((data, f64::from(x.scale().to_f32()))),
    }
}

/// A cotangent of the data `data` at the scale `scale`, with what the product of the scales has left.
pub(super) fn factored(op: &'static str, data: &Tensor, rule: &Factored) -> Result<Scaled> {
    Scaled::new(times(op, data, rule.data_factor)?, rule.scale).zeroed()
}
