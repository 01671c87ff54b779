//! Observing values and cotangents.

use super::dtype::ScaledDType;
use super::error::{Result, unsupported};
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::wide_dtype;
use half::{bf16, f16};

/// Shares of the elements of a tensor that are outside the normal range of a dtype.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_scaled::as_scaled;
/// use fp8_core::Format;
/// let x = Tensor::new(&[0f32, 1.0, 0.001, 1000.0], &Device::Cpu)?;
/// let outside = as_scaled(&x, None)?.out_of_range(Format::E4M3)?;
/// assert_eq!((outside.over, outside.under, outside.share()), (0.25, 0.25, 0.5));
/// # Ok::<(), fp8_scaled::Error>(())
/// ```
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[non_exhaustive]
pub struct OutOfRange {
    /// Share whose magnitude is above the largest finite value, NaN included.
    pub over: f64,
    /// Share whose magnitude is below the smallest normal value, without zeros.
    pub under: f64,
}

impl OutOfRange {
    /// The share of both.
    pub fn share(self) -> f64 {
        self.over + self.under
    }
}

impl Scaled {
    /// Which shares of the elements of the data, not of the value, a cast to `dtype` would saturate, or make subnormal or zero. Waits for
    /// the device.
    ///
    /// # Errors
    /// If `dtype` is not f32, bf16, f16, f64 or an FP8 format.
    pub fn out_of_range(&self, dtype: impl Into<ScaledDType>) -> Result<OutOfRange> {
        let (max, min_normal) = match dtype.into() {
            ScaledDType::Fp8(format) => (format.max().into(), format.min_normal().into()),
            ScaledDType::Float(DType::F16) => (f16::MAX.to_f64(), f16::MIN_POSITIVE.to_f64()),
            ScaledDType::Float(DType::BF16) => (bf16::MAX.to_f64(), bf16::MIN_POSITIVE.to_f64()),
            ScaledDType::Float(DType::F32) => (f32::MAX.into(), f32::MIN_POSITIVE.into()),
            ScaledDType::Float(DType::F64) => (f64::MAX, f64::MIN_POSITIVE),
            ScaledDType::Float(got) => {
                return Err(unsupported(
                    "out_of_range",
                    "the range",
                    "f32, bf16, f16, f64 or an FP8 format",
                    got,
                ));
            }
        };
        if self.elem_count() == 0 {
            return Ok(OutOfRange::default());
        }
        let magnitude = self.float(wide_dtype(self.compute_dtype()))?.abs()?;
        let share = |mask: Tensor| -> Result<f64> {
            let count = mask.to_dtype(DType::F64)?.sum_all()?.to_scalar::<f64>()?;
            Ok(count / self.elem_count() as f64)
        };
        // Comparisons with NaN are false.
        let within = share(magnitude.le(max)?)?;
        let normal_or_zero = share(magnitude.ge(min_normal)?.add(&magnitude.eq(0f64)?)?)?;
        let nan = share(magnitude.ne(&magnitude)?)?;
        Ok(OutOfRange {
            over: 1.0 - within,
            under: (1.0 - normal_or_zero - nan).max(0.0),
        })
    }

    /// The same value; the backward pass calls `look` with its cotangent, once all parts of the cotangent have been added. An error from
    /// `look` fails the backward pass.
    pub fn inspect_backward(
        &self,
        look: impl Fn(&Scaled) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        self.recorded(self.detach(), "inspect_backward", move |g| {
            look(g)?;
            Ok(g.detach())
        })
    }
}
