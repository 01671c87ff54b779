//! Comparisons, whose results are plain tensors without gradients.

use super::arith::meet;
use super::error::Result;
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::wide_dtype;

impl Scaled {
    /// 1 where the values are equal, U8; shapes broadcast.
    ///
    /// # Errors
    /// As [`Scaled::add`].
    pub fn eq(&self, other: &Self) -> Result<Tensor> {
        self.compared("eq", other, |a, b| a.eq(b))
    }

    /// 1 where the values differ, as [`Scaled::eq`].
    pub fn ne(&self, other: &Self) -> Result<Tensor> {
        self.compared("ne", other, |a, b| a.ne(b))
    }

    /// 1 where this value is less, as [`Scaled::eq`].
    pub fn lt(&self, other: &Self) -> Result<Tensor> {
        self.compared("lt", other, |a, b| a.lt(b))
    }

    /// 1 where this value is less or equal, as [`Scaled::eq`].
    pub fn le(&self, other: &Self) -> Result<Tensor> {
        self.compared("le", other, |a, b| a.le(b))
    }

    /// 1 where this value is greater, as [`Scaled::eq`].
    pub fn gt(&self, other: &Self) -> Result<Tensor> {
        self.compared("gt", other, |a, b| a.gt(b))
    }

    /// 1 where this value is greater or equal, as [`Scaled::eq`].
    pub fn ge(&self, other: &Self) -> Result<Tensor> {
        self.compared("ge", other, |a, b| a.ge(b))
    }

    /// Compares in f64, which represents every product of 32-bit data and a scale.
    fn compared(
        &self,
        op: &'static str,
        other: &Self,
        of: impl Fn(&Tensor, &Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        let (a, b) = meet(op, &self.detach().zeroed()?, &other.detach().zeroed()?)?;
        let (sa, sb) = (self.scale().to_f32(), other.scale().to_f32());
        if sa == sb && !self.scale().is_zero() {
            let wide = wide_dtype(a.dtype());
            return Ok(of(&a.to_dtype(wide)?, &b.to_dtype(wide)?)?);
        }
        let value = |x: Tensor, s: f32| x.to_dtype(DType::F64)? * f64::from(s);
        Ok(of(&value(a, sa)?, &value(b, sb)?)?)
    }

    /// 1 where the value is finite, U8.
    pub fn is_finite(&self) -> Result<Tensor> {
        let x = self.detach().zeroed()?;
        let wide = x.float(wide_dtype(x.compute_dtype()))?;
        Ok(wide.abs()?.lt(f64::INFINITY)?)
    }

    /// The index of the largest value along `dim`, U32, without that dimension; the first index of equal values.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if the dimension does not exist or is empty.
    pub fn argmax(&self, dim: usize) -> Result<Tensor> {
        self.place("argmax", dim, |x| x.argmax(dim))
    }

    /// The index of the smallest value, as [`Scaled::argmax`].
    ///
    /// # Errors
    /// As [`Scaled::argmax`].
    pub fn argmin(&self, dim: usize) -> Result<Tensor> {
        self.place("argmin", dim, |x| x.argmin(dim))
    }

    /// The index of the largest of all values in row-major order: a U32 scalar.
    ///
    /// # Errors
    /// As [`Scaled::argmax`].
    pub fn argmax_all(&self) -> Result<Tensor> {
        self.detach().flatten_all()?.argmax(0)
    }

    /// The index of the smallest value, as [`Scaled::argmax_all`].
    ///
    /// # Errors
    /// As [`Scaled::argmax`].
    pub fn argmin_all(&self) -> Result<Tensor> {
        self.detach().flatten_all()?.argmin(0)
    }

    fn place(
        &self,
        op: &'static str,
        dim: usize,
        of: impl Fn(&Tensor) -> candle_core::Result<Tensor>,
    ) -> Result<Tensor> {
        super::check::check_values(op, self, dim)?;
        let x = self.detach().zeroed()?;
        Ok(of(&x.float(wide_dtype(x.compute_dtype()))?)?)
    }
}
