//! Sums and other reductions over dimensions.

use super::kernels::Times;
use super::options::Options;
use super::value::Scaled;
use crate::error::{Error, Result};
use candle_core::{DType, Tensor};
use fp8_core::scaled::{Factored, sum_rule};

/// Checks dimensions to reduce.
pub(super) fn check_dims(op: &'static str, x: &Scaled, dims: &[usize]) -> Result<()> {
    match dims.iter().all(|&dim| dim < x.rank()) {
        true => Ok(()),
        false => Err(Error::Shape {
            op,
            what: "the operand",
            expected: format!("dimensions {dims:?} to reduce"),
            got: x.dims().to_vec(),
        }),
    }
}

impl Scaled {
    /// The sum over `dims`, which stay with the size 1. Scale: `s * r(sqrt(n))` for sums of n values. Summed in f32 (f64 data in
    /// f64).
    ///
    /// # Errors
    /// If a dimension does not exist.
    pub fn sum_keepdim(&self, dims: &[usize]) -> Result<Self> {
        let op = "sum";
        check_dims(op, self, dims)?;
        let length = dims.iter().map(|&dim| self.dims()[dim]).product();
        let rule = sum_rule(self.scale(), length, Options::current().round());
        let value = self.reduced(op, &rule, |x| Ok(x.sum_keepdim(dims)?))?;
        let shape = self.dims().to_vec();
        Ok(Self::record(value, op, [self], move |g, _| {
            Ok([Some(g.broadcast_as(&shape)?)])
        }))
    }

    /// The sum of all elements, without dimensions.
    pub fn sum_all(&self) -> Result<Self> {
        let dims: Vec<usize> = (0..self.rank()).collect();
        self.sum_keepdim(&dims)?.reshape(&[])
    }

    /// `f` of the data in the dtype of sums, times the factor of `rule`, rounded once.
    pub(super) fn reduced(
        &self,
        op: &'static str,
        rule: &Factored,
        f: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let dtype = self.compute_dtype();
        let wide: DType = crate::ops::wide_dtype(dtype);
        let reduced = f(&self.float(wide)?.contiguous()?)?;
        let reduced = super::kernels::map1(op, Times(rule.data_factor), &reduced)?;
        Self::new(reduced.to_dtype(dtype)?, rule.scale).zeroed()
    }
}
