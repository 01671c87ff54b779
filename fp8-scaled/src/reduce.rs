//! Sums and other reductions over dimensions.

use super::check::{check_dims, check_values};
use super::error::Result;
use super::kernels::{Times, map, map_fn};
use super::options::Options;
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_candle::ops::elements::wide_dtype;
use fp8_core::scaled::{Factored, mean_rule, sum_rule};

map_fn!(
    Taken {},
    |g, x, y| if x == y { g } else { R::ZERO },
    |g, x, y| x.eq(y)?.where_cond(g, &g.zeros_like()?)?
);

impl Scaled {
    /// The sum over `dims`, which stay with the size 1. Scale: `s * r(sqrt(n))` for sums of n values. Summed in f32 (f64 data in
    /// f64).
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if a dimension does not exist or is named twice.
    pub fn sum_keepdim(&self, dims: &[usize]) -> Result<Self> {
        let op = "sum";
        check_dims(op, self, dims)?;
        let length = dims.iter().map(|&dim| self.dims()[dim]).product();
        let rule = sum_rule(self.scale(), length, Options::current().round());
        let value = self.reduced(op, &rule, |x| Ok(x.sum_keepdim(dims)?))?;
        let shape = self.dims().to_vec();
        Ok(self.recorded(value, op, move |g| g.broadcast_as(&shape)))
    }

    /// The sum of all elements, without dimensions.
    pub fn sum_all(&self) -> Result<Self> {
        let dims: Vec<usize> = (0..self.rank()).collect();
        self.sum_keepdim(&dims)?.reshape(&[])
    }

    /// The mean over `dims`, which stay with the size 1. Scale: `s * r(sqrt(n)) / r(n)`, that of the sum divided by the constant n.
    ///
    /// # Errors
    /// As [`Scaled::sum_keepdim`].
    pub fn mean_keepdim(&self, dims: &[usize]) -> Result<Self> {
        let op = "mean";
        check_dims(op, self, dims)?;
        let length: usize = dims.iter().map(|&dim| self.dims()[dim]).product();
        let rule = mean_rule(self.scale(), length, Options::current().round());
        let value = self.reduced(op, &rule, |x| Ok(x.sum_keepdim(dims)?))?;
        let shape = self.dims().to_vec();
        Ok(self.recorded(value, op, move |g| {
            let each = g.detach().div_constant(length.max(1) as f64)?;
            each.broadcast_as(&shape)
        }))
    }

    /// The mean of all elements, without dimensions.
    pub fn mean_all(&self) -> Result<Self> {
        let dims: Vec<usize> = (0..self.rank()).collect();
        self.mean_keepdim(&dims)?.reshape(&[])
    }

    /// The largest value along `dim`, which stays with the size 1; the same scale. If several values are equal, each takes the whole
    /// cotangent, as in candle.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if the dimension does not exist or is empty.
    pub fn max_keepdim(&self, dim: usize) -> Result<Self> {
        self.extreme_of("max", dim, |x| Ok(x.max_keepdim(dim)?))
    }

    /// The smallest value, as [`Scaled::max_keepdim`].
    ///
    /// # Errors
    /// As [`Scaled::max_keepdim`].
    pub fn min_keepdim(&self, dim: usize) -> Result<Self> {
        self.extreme_of("min", dim, |x| Ok(x.min_keepdim(dim)?))
    }

    /// The largest of all values, without dimensions.
    ///
    /// # Errors
    /// As [`Scaled::max_keepdim`].
    pub fn max_all(&self) -> Result<Self> {
        self.flatten_all()?.max_keepdim(0)?.reshape(&[])
    }

    /// The smallest of all values, without dimensions.
    ///
    /// # Errors
    /// As [`Scaled::max_keepdim`].
    pub fn min_all(&self) -> Result<Self> {
        self.flatten_all()?.min_keepdim(0)?.reshape(&[])
    }

    fn extreme_of(
        &self,
        op: &'static str,
        dim: usize,
        f: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        check_values(op, self, dim)?;
        let kept = Factored {
            scale: self.scale(),
            data_factor: 1.0,
        };
        let value = self.reduced(op, &kept, f)?;
        let (x, y) = (self.detach().zeroed()?, value.clone());
        Ok(self.recorded(value, op, move |g| {
            let dtype = x.compute_dtype();
            let spread = |of: &Self| -> Result<Tensor> {
                Ok(of.float(dtype)?.broadcast_as(x.dims())?.contiguous()?)
            };
            let data = map(op, Taken {}, [&spread(g)?, &x.data()?, &spread(&y)?])?;
            Self::new(data, g.scale()).zeroed()
        }))
    }

    /// `f` of the data in the dtype of sums, times the factor of `rule`, rounded once.
    pub(super) fn reduced(
        &self,
        op: &'static str,
        rule: &Factored,
        f: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let dtype = self.compute_dtype();
        let wide: DType = wide_dtype(dtype);
        let reduced = f(&self.float(wide)?.contiguous()?)?;
        let k = rule.data_factor.into();
        let reduced = map(op, Times { k }, [&reduced])?;
        Self::new(reduced.to_dtype(dtype)?, rule.scale).zeroed()
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel_tests::check;
    use super::*;

    #[test]
    fn kernels_and_their_definitions() {
        check(Taken {}, false);
    }
}
