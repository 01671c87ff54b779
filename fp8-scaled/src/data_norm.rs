//! Norms of data, which dynamic rescaling moves into the scale.

use super::error::Result;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::{BlockKernel, Real, max, reduce_blocks, sum, wide_dtype};
use fp8_core::floor_to_power_of_two;

/// Which norm of the data dynamic rescaling moves into the scale.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fp8_scaled::*;
/// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
/// let of = |norm| x.dynamic_rescale(norm).map(|x| x.scale().to_f32());
/// assert_eq!([of(Norm::Max)?, of(Norm::L1)?, of(Norm::L2)?], [4.0, 2.0, 2.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Norm {
    /// The largest magnitude.
    Max,
    /// The mean magnitude.
    L1,
    /// The root of the mean square.
    L2,
}

/// The norm of all elements, at least one; not finite if an element is not finite.
pub(super) fn norm_of(data: &Tensor, norm: Norm) -> Result<f32> {
    let plain = |data: &Tensor, norm: Norm| match data.device().is_cpu() {
        true => on_cpu(data, norm),
        false => composed(data, norm),
    };
    let of = plain(data, norm)?;
    if of.is_finite() {
        return Ok(of as f32);
    }
    // Sums of large finite data or of their squares overflow: divide by the largest magnitude first.
    let largest = plain(data, Norm::Max)?;
    let power = f64::from(floor_to_power_of_two(largest as f32));
    if !power.is_finite() {
        return Ok(f32::NAN);
    }
    let divided = super::kernels::wide([data], |[x]| Ok((x / power)?))?;
    Ok((plain(&divided, norm)? * power).min(f32::MAX.into()) as f32)
}

/// One pass over the data. Blocks are added in order, so that no bit depends on the number of threads.
fn on_cpu(data: &Tensor, norm: Norm) -> Result<f64> {
    let parts = reduce_blocks("dynamic_rescale", data, &norm)?;
    let count = data.elem_count() as f64;
    Ok(match norm {
        Norm::Max => parts
            .into_iter()
            .fold(0.0, |a, b| if a.is_nan() || a > b { a } else { b }),
        Norm::L1 => parts.iter().sum::<f64>() / count,
        Norm::L2 => (parts.iter().sum::<f64>() / count).sqrt(),
    })
}

impl BlockKernel for Norm {
    #[inline(always)]
    fn block<R: Real>(&self, x: &[R]) -> R {
        match self {
            // The maximum ignores NaN; 0 times the data propagates it.
            Self::Max => max(x, |x| x.abs()) + sum(x, |x| R::ZERO * x),
            Self::L1 => sum(x, |x| x.abs()),
            Self::L2 => sum(x, |x| x * x),
        }
    }
}

/// The definition, used on other devices.
fn composed(data: &Tensor, norm: Norm) -> Result<f64> {
    let data = data.to_dtype(wide_dtype(data.dtype()))?.flatten_all()?;
    let of = match norm {
        Norm::Max => (data.abs()?.max(0)? + (&data * 0.0)?.sum(0)?)?,
        Norm::L1 => data.abs()?.mean(0)?,
        Norm::L2 => data.sqr()?.mean(0)?.sqrt()?,
    };
    Ok(of.to_dtype(DType::F64)?.to_scalar()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    #[test]
    fn kernel_and_definition() -> Result<()> {
        for norm in [Norm::Max, Norm::L1, Norm::L2] {
            for count in [1, 7, 100, 100_000] {
                let x = (0..count).map(|i| ((i * 37 + 5) % 101) as f32 / 16.0 - 3.0);
                let x = Tensor::from_iter(x, &Device::Cpu)?;
                for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
                    let x = x.to_dtype(dtype)?;
                    let (got, expected) = (f64::from(norm_of(&x, norm)?), composed(&x, norm)?);
                    // candle adds 100,000 terms one after the other.
                    let error = (got - expected).abs() / expected;
                    assert!(
                        error < 1e-4,
                        "{norm:?} of {count} {dtype:?}: {got}, {expected}"
                    );
                }
            }
            for bad in [f32::NAN, f32::INFINITY] {
                for place in [0, 70_000] {
                    let x = (0..100_000).map(|i| if i == place { bad } else { 1.0 });
                    let x = Tensor::from_iter(x, &Device::Cpu)?;
                    assert!(!norm_of(&x, norm)?.is_finite(), "{norm:?} {bad} at {place}");
                    assert!(!composed(&x, norm)?.is_finite());
                }
            }
        }
        Ok(())
    }

    #[test]
    fn large_data_have_finite_norms() -> Result<()> {
        for largest in [1e19f32, 3e38] {
            for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F64, 1e-5)]
            {
                let x = Tensor::full(largest, 100_000, &Device::Cpu)?.to_dtype(dtype)?;
                for norm in [Norm::Max, Norm::L1, Norm::L2] {
                    let got = norm_of(&x, norm)?;
                    assert!(
                        (got / largest - 1.0).abs() < tolerance,
                        "{norm:?} {dtype:?}: {got} of {largest}"
                    );
                }
            }
        }
        Ok(())
    }
}
