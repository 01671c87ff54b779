//! Conversions between scaled tensors and the data that kernels read and write.

use super::error::Result;
use super::kernels::times;
use super::value::Scaled;
use candle_core::Tensor;
use fp8_core::scaled::Factored;

/// The data in floating point and the factor from data to values; zeros and 1 for a zero scale. For functions that are not homogeneous.
pub(super) fn sized(x: &Scaled) -> Result<(Tensor, f64)> {
    let data = x.data()?;
    match x.scale().is_zero() {
        true => Ok((data.zeros_like()?, 1.0)),
        false => Ok((data, f64::from(x.scale().to_f32()))),
    }
}

/// A cotangent with the scale of `rule` and the data `data`, times the rule's data factor.
pub(super) fn factored(op: &'static str, data: &Tensor, rule: &Factored) -> Result<Scaled> {
    Scaled::new(times(op, data, rule.data_factor)?, rule.scale).zeroed()
}
