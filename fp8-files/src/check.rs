//! Checks of numbers from a file, before anything is computed with them.
//!
//! A scale of NaN, infinity or zero does no visible harm at first: some layers later it becomes NaN, or the model writes nonsense. So
//! every loader checks its numbers and names the tensor and the value.

use crate::error::{Error, Result};
use candle_core::{DType, Device, Tensor};

/// What a scale must be, for messages: see [`is_scale`].
pub(crate) const SCALE: &str =
    "positive, finite and not subnormal, and its reciprocal too, as a scale has to be";

/// Whether a number can be a scale. The reciprocal is the other direction of the same scale, and both are used.
pub(crate) fn is_scale(value: f32) -> bool {
    value > 0. && value.is_normal() && value.recip().is_normal()
}

/// Checks scales, quant_scales or dequant_scales, of a floating point dtype.
///
/// # Errors
/// [`Error::TensorDType`] for integers, [`Error::TensorValue`] for the first element that is not a scale.
pub(crate) fn check_scale_values(name: &str, scales: &Tensor) -> Result<()> {
    if !is_float(scales.dtype()) {
        return Err(Error::TensorDType {
            tensor: name.to_string(),
            got: scales.dtype().as_str().into(),
            expected: "f32, bf16, f16 or f64".into(),
        });
    }
    match first_outside(scales, |value| is_scale(value as f32))? {
        None => Ok(()),
        Some((index, value)) => Err(Error::TensorValue {
            tensor: name.to_string(),
            index,
            value,
            expected: SCALE.into(),
        }),
    }
}

/// Index, in row-major order, and value of the first element for which `fits` is false.
///
/// # Errors
/// If candle cannot read the tensor.
pub fn first_outside(
    tensor: &Tensor,
    fits: impl Fn(f64) -> bool,
) -> candle_core::Result<Option<(usize, f64)>> {
    let tensor = tensor.detach().flatten_all()?.to_device(&Device::Cpu)?;
    Ok(match tensor.dtype() {
        // The common cases without a second copy.
        DType::F32 => {
            let values = tensor.to_vec1::<f32>()?;
            let mut values = values.into_iter().map(f64::from).enumerate();
            values.find(|(_, value)| !fits(*value))
        }
        DType::F16 => {
            let values = tensor.to_vec1::<half::f16>()?;
            let mut values = values.into_iter().map(f64::from).enumerate();
            values.find(|(_, value)| !fits(*value))
        }
        _ => {
            let values = tensor.to_dtype(DType::F64)?.to_vec1::<f64>()?;
            let mut values = values.into_iter().enumerate();
            values.find(|(_, value)| !fits(*value))
        }
    })
}

/// Whether candle computes in this dtype.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64)
}
