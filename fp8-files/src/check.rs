//! Checks of numbers that came from a file, before anything is computed with them.
//!
//! A scale of NaN, infinity or zero does no harm that shows at once: it makes NaN some layers later, or a model that
//! says nothing. So every loader checks what it takes, and names the tensor and the value.

use crate::error::{Error, Result};
use candle_core::{DType, Tensor};

/// What a scale has to be. The reciprocal is the other direction of the same scale, and both are used.
const SCALE: &str =
    "positive, finite and not subnormal, and its reciprocal too, as a scale has to be";

/// Checks scales, quant_scales or dequant_scales, of a floating point dtype.
///
/// # Errors
/// [`Error::TensorDType`] for integers, [`Error::TensorValue`] for the first NaN, infinite, zero, negative or subnormal
/// element, and for one so large that its reciprocal is subnormal.
pub(crate) fn check_scale_values(name: &str, scales: &Tensor) -> Result<()> {
    let fits = |value: f64| {
        let value = value as f32;
        value > 0. && value.is_normal() && value.recip().is_normal()
    };
    check_values(name, scales, SCALE, fits)
}

fn check_values(
    name: &str,
    tensor: &Tensor,
    expected: &'static str,
    fits: impl Fn(f64) -> bool,
) -> Result<()> {
    if !is_float(tensor.dtype()) {
        return Err(Error::TensorDType {
            tensor: name.to_string(),
            got: tensor.dtype().as_str().into(),
            expected: "f32, bf16, f16 or f64".into(),
        });
    }
    match first_outside(tensor, fits)? {
        None => Ok(()),
        Some((index, value)) => Err(Error::TensorValue {
            tensor: name.to_string(),
            index,
            value,
            expected: expected.into(),
        }),
    }
}

/// Index, in row-major order, and value of the first element that does not fit.
pub fn first_outside(
    tensor: &Tensor,
    fits: impl Fn(f64) -> bool,
) -> candle_core::Result<Option<(usize, f64)>> {
    let tensor = tensor.detach().flatten_all()?;
    Ok(match tensor.dtype() {
        // The common case without a second copy.
        DType::F32 => {
            let values = tensor.to_vec1::<f32>()?;
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

/// The dtypes in which candle computes.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F32 | DType::BF16 | DType::F16 | DType::F64)
}
