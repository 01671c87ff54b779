//! Comparisons, whose results are plain tensors without gradients.

use super::arith::meet;
use super::error::Result;
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::wide_dtype;

macro_rules! comparisons {
    ($($(#[$doc:meta])+ $op:ident;)+) => {$(
        $(#[$doc])+
        ///
        /// # Errors
        /// As [`Scaled::add`].
        pub fn $op(&self, other: &Self) -> Result<Tensor> {
            self.compared(stringify!($op), other, |a, b| a.$op(b))
        }
    )+};
}

impl Scaled {
    comparisons! {
        /// 1 where the values are equal, U8; shapes broadcast.
        eq;
        /// 1 where the values differ, U8; shapes broadcast.
        ne;
        /// 1 where this value is less than `other`, U8; shapes broadcast.
        lt;
        /// 1 where this value is less than or equal to `other`, U8; shapes broadcast.
        le;
        /// 1 where this value is greater than `other`, U8; shapes broadcast.
        gt;
        /// 1 where this value is greater than or equal to `other`, U8; shapes broadcast.
        ge;
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
