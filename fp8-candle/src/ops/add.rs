//! The sum of two tensors.

use crate::base::error::Result;
use crate::base::simd::simd;
use crate::device::cpu::elements::{for_dtype, map_rows, tensor, with_slices};
use candle_core::{DType, Tensor};

/// `a + b` of one shape and dtype, outside any graph. candle would add on its own threads, which wait for each other in busy
/// loops.
pub(crate) fn add(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let floats = [DType::F32, DType::F64, DType::BF16, DType::F16];
    let ours = a.device().is_cpu() && floats.contains(&a.dtype());
    if !ours || (a.dims(), a.dtype()) != (b.dims(), b.dtype()) || !b.device().is_cpu() {
        return Ok((a.detach() + b.detach())?);
    }
    for_dtype!("add", a.dtype(), T => {
        with_slices([a, b], |slices: [&[T]; 2]| {
            let sums = map_rows(slices, 1, |_, [a, b], sums| {
                simd(
                    #[inline(always)]
                    || {
                        for ((sum, &a), &b) in sums.iter_mut().zip(a).zip(b) {
                            *sum = a + b;
                        }
                    },
                );
            });
            tensor(sums, a.shape())
        })?
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn sums_are_those_of_candle() -> Result<()> {
        for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16, DType::I64] {
            let of = |factor: f64| -> Result<Tensor> {
                let x = Tensor::arange(0i64, 70_000, &Device::Cpu)?.to_dtype(DType::F64)?;
                Ok((x * factor)?.to_dtype(dtype)?.reshape((700, 100))?.t()?)
            };
            let (a, b) = (of(1.37)?, of(-0.0119)?);
            let far = (add(&a, &b)? - (&a + &b)?)?.to_dtype(DType::F64)?;
            assert_eq!(far.abs()?.max_all()?.to_scalar::<f64>()?, 0., "{dtype:?}");
        }
        let (a, b) = (
            Tensor::ones(3, DType::F32, &Device::Cpu)?,
            Tensor::ones(4, DType::F32, &Device::Cpu)?,
        );
        assert!(add(&a, &b).is_err());
        Ok(())
    }
}
