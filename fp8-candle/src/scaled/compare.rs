//! Comparisons: plain tensors, without gradients.

use super::arith::meet;
use super::value::Scaled;
use crate::base::error::Result;
use candle_core::{DType, Tensor};

impl Scaled {
    /// 1 where the values are equal, U8; shapes broadcast.
    ///
    /// # Errors
    /// As [`Scaled::add`].
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let a = Scaled::from_parts(&Tensor::new(&[1f32, 2.0], &Device::Cpu)?, 2.0)?;
    /// let b = Scaled::from_parts(&Tensor::new(&[2f32, 5.0], &Device::Cpu)?, 1.0)?;
    /// assert_eq!(a.eq(&b)?.to_vec1::<u8>()?, [1, 0]);
    /// assert_eq!(a.lt(&b)?.to_vec1::<u8>()?, [0, 1]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn eq(&self, other: &Self) -> Result<Tensor> {
        self.compared("eq", other, |a, b| a.eq(b))
    }

    /// 1 where the values differ, as [`Scaled::eq`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.ne(&x)?.to_vec1::<u8>()?, [0, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ne(&self, other: &Self) -> Result<Tensor> {
        self.compared("ne", other, |a, b| a.ne(b))
    }

    /// 1 where this value is less, as [`Scaled::eq`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.lt(&x.neg()?)?.to_vec1::<u8>()?, [0, 1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn lt(&self, other: &Self) -> Result<Tensor> {
        self.compared("lt", other, |a, b| a.lt(b))
    }

    /// 1 where this value is less or equal, as [`Scaled::eq`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.le(&x)?.to_vec1::<u8>()?, [1, 1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn le(&self, other: &Self) -> Result<Tensor> {
        self.compared("le", other, |a, b| a.le(b))
    }

    /// 1 where this value is greater, as [`Scaled::eq`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.gt(&x.neg()?)?.to_vec1::<u8>()?, [1, 0]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn gt(&self, other: &Self) -> Result<Tensor> {
        self.compared("gt", other, |a, b| a.gt(b))
    }

    /// 1 where this value is greater or equal, as [`Scaled::eq`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.ge(&x)?.to_vec1::<u8>()?, [1, 1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn ge(&self, other: &Self) -> Result<Tensor> {
        self.compared("ge", other, |a, b| a.ge(b))
    }

    /// In f64, which has every product of 32-bit data and a scale, so that the scales cannot take values out of range.
    fn compared(
        &self,
        op: &'static str,
        other: &Self,
        of: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let (a, b) = meet(op, &self.detach().zeroed()?, &other.detach().zeroed()?)?;
        let (sa, sb) = (self.scale().to_f32(), other.scale().to_f32());
        if sa == sb && !self.scale().is_zero() {
            let wide = crate::ops::wide_dtype(a.dtype());
            return Ok(of(&a.to_dtype(wide)?, &b.to_dtype(wide)?)?);
        }
        let value = |x: Tensor, s: f32| x.to_dtype(DType::F64)? * f64::from(s);
        Ok(of(&value(a, sa)?, &value(b, sb)?)?)
    }

    /// 1 where the value is finite, U8.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Tensor::new(&[1f32, f32::INFINITY, f32::NAN], &Device::Cpu)?;
    /// assert_eq!(Scaled::from_parts(&x, 2.0)?.is_finite()?.to_vec1::<u8>()?, [1, 0, 0]);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn is_finite(&self) -> Result<Tensor> {
        let x = self.detach().zeroed()?;
        let wide = x.float(crate::ops::wide_dtype(x.compute_dtype()))?;
        Ok(wide.abs()?.lt(f64::INFINITY)?)
    }

    /// The place of the largest value along `dim`, U32 without that dimension; the first of equal ones.
    ///
    /// # Errors
    /// [`Error::Shape`](crate::Error::Shape) if the dimension does not exist or is empty.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use fp8_candle::scaled::Scaled;
    /// let x = Scaled::from_parts(&Tensor::new(&[[1f32, 5.0], [4.0, 3.0]], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.argmax(1)?.to_vec1::<u32>()?, [1, 0]);
    /// assert_eq!(x.argmax_all()?.to_scalar::<u32>()?, 1);
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn argmax(&self, dim: usize) -> Result<Tensor> {
        self.place("argmax", dim, |x| x.argmax(dim))
    }

    /// The place of the smallest value, as [`Scaled::argmax`].
    ///
    /// # Errors
    /// As [`Scaled::argmax`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[[1f32, -4.0], [3.0, 2.0]], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.argmin(1)?.to_vec1::<u32>()?, [1, 1]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn argmin(&self, dim: usize) -> Result<Tensor> {
        self.place("argmin", dim, |x| x.argmin(dim))
    }

    /// The place of the largest value among all, in row-major order: U32 without dimensions.
    ///
    /// # Errors
    /// As [`Scaled::argmax`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.argmax_all()?.to_scalar::<u32>()?, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn argmax_all(&self) -> Result<Tensor> {
        self.detach().flatten_all()?.argmax(0)
    }

    /// The place of the smallest value, as [`Scaled::argmax_all`].
    ///
    /// # Errors
    /// As [`Scaled::argmax`].
    ///
    /// ```
    /// # use candle_core::{Device, Tensor};
    /// # use fp8_candle::scaled::*;
    /// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
    /// assert_eq!(x.argmin_all()?.to_scalar::<u32>()?, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn argmin_all(&self) -> Result<Tensor> {
        self.detach().flatten_all()?.argmin(0)
    }

    fn place(
        &self,
        op: &'static str,
        dim: usize,
        of: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        super::reduce::check_values(op, self, dim)?;
        let x = self.detach().zeroed()?;
        Ok(of(&x.float(crate::ops::wide_dtype(x.compute_dtype()))?)?)
    }
}
