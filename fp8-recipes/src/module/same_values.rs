//! Whether tensors hold the same: a model that reads a file more than once has several of one name.

use crate::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::fingerprint;
use fp8_scaled::Parameter;

/// Whether a file would hold the same for two parameters or buffers.
pub(crate) fn has_same_values(a: &Tensor, b: &Tensor) -> Result<bool> {
    // The tensor of a scaled parameter, or of one in parts, does not say its value.
    let [a, b] = [a, b].map(|tensor| Parameter::of(tensor).value(DType::F32));
    has_same_bits(&a?, &b?)
}

/// Whether two tensors have one shape and dtype and the same bits.
pub(crate) fn has_same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    if a.dims() != b.dims() || a.dtype() != b.dtype() {
        return Ok(false);
    }
    let (a, b) = (a.detach().contiguous()?, b.detach().contiguous()?);
    match a.dtype() {
        // Numbers that are equal may differ in bits, and NaN is not even equal to itself.
        DType::F64 | DType::F32 | DType::BF16 | DType::F16 => {
            Ok(fingerprint(&a)? == fingerprint(&b)?)
        }
        DType::U8 | DType::U32 | DType::I64 if a.elem_count() > 0 => {
            let differences = a.ne(&b.to_device(a.device())?)?.flatten_all()?;
            Ok(differences.max(0)?.to_scalar::<u8>()? == 0)
        }
        // Without an element there is no difference; other dtypes cannot be compared.
        _ => Ok(a.elem_count() == 0),
    }
}
