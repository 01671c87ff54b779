//! Conversions between dtypes.

use crate::base::data::storage::take_storage;
use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use crate::device::cpu::elements::converted;
use crate::graph::{Ready, attach};
use candle_core::{DType, Tensor};

/// `x` in `dtype`, with the values of [`Tensor::to_dtype`]; on the CPU faster between f32 and 16 bits. The gradient has the dtype of `x`.
///
/// # Errors
/// If candle does not convert between the dtypes.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Var};
/// let x = Var::new(&[1f32, 257.], &Device::Cpu)?;
/// let y = fp8_candle::ops::to_dtype(&x, DType::BF16)?;
/// assert_eq!(y.to_dtype(DType::F32)?.to_vec1::<f32>()?, [1., 256.]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    if x.dtype() == dtype {
        return Ok(x.clone());
    }
    if !x.device().is_cpu() {
        return Ok(x.to_dtype(dtype)?);
    }
    let _scope = enter(Kind::Cast);
    let result = Ready::new(take_storage(converted(x, dtype)?)?, x.shape())?;
    attach("to_dtype", [x], result, move |[x], _, grad| {
        let _scope = enter(Kind::Cast);
        Ok([Some(converted(grad, x.dtype())?)])
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{Device, Var};

    #[test]
    fn values_and_gradients_are_those_of_candle() -> Result<()> {
        let x = Tensor::arange(-20_000i64, 20_000, &Device::Cpu)?.to_dtype(DType::F64)?;
        let x = ((x * 0.0137)?.sin()?.exp()? * 9.)?
            .reshape((200, 200))?
            .t()?;
        for from in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for to in [DType::F32, DType::BF16, DType::F16, DType::F64] {
                let x = Var::from_tensor(&x.to_dtype(from)?)?;
                let gradient = |y: Tensor| -> Result<Tensor> {
                    let loss = (y.to_dtype(DType::F64)?.sqr()? * 0.37)?.sum_all()?;
                    Ok(loss.backward()?.get(&x).unwrap().to_dtype(DType::F64)?)
                };
                let (ours, candles) = (to_dtype(&x, to)?, x.to_dtype(to)?);
                let far = |a: &Tensor, b: &Tensor| -> Result<f64> {
                    let far = (a.to_dtype(DType::F64)? - b.to_dtype(DType::F64)?)?;
                    Ok(far.abs()?.max_all()?.to_scalar::<f64>()?)
                };
                assert_eq!(ours.dtype(), to);
                assert_eq!(far(&ours, &candles)?, 0., "{from:?} {to:?}");
                assert_eq!(far(&gradient(ours)?, &gradient(candles)?)?, 0.);
            }
        }
        Ok(())
    }
}
