//! Operations that move elements: the scale stays.

use super::value::{Data, Scaled};
use crate::error::{Error, Result};
use candle_core::Tensor;

impl Scaled {
    /// `f` of the tensor that holds the data, codes or numbers, with the same scale and no graph.
    pub(super) fn moved(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        match self.raw() {
            Data::Float(data) => Ok(Self::new(f(data)?, self.scale())),
            Data::Fp8(data) => {
                let codes = f(data.codes())?.contiguous()?;
                let moved = crate::Fp8Tensor::from_parts(
                    codes,
                    data.format(),
                    data.granularity(),
                    data.contraction(),
                    data.dequant_scale().clone(),
                )?;
                Ok(Self::new_fp8(moved, self.scale()))
            }
        }
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, dims: &[usize]) -> Result<Self> {
        if dims.iter().product::<usize>() != self.elem_count() {
            return Err(Error::Shape {
                op: "reshape",
                what: "the operand",
                expected: format!("as many elements as {dims:?}"),
                got: self.dims().to_vec(),
            });
        }
        let value = self.moved(|x| Ok(x.reshape(dims)?))?;
        let from = self.dims().to_vec();
        Ok(Self::record(value, "reshape", [self], move |g, _| {
            Ok([Some(g.reshape(&from)?)])
        }))
    }

    /// Repeats elements along dimensions of size 1, and along new ones in front.
    ///
    /// # Errors
    /// If the shape does not broadcast to `dims`.
    pub fn broadcast_as(&self, dims: &[usize]) -> Result<Self> {
        if super::arith::broadcast_dims("broadcast_as", self.dims(), dims)? != dims {
            return Err(Error::Shape {
                op: "broadcast_as",
                what: "the operand",
                expected: format!("a shape that broadcasts to {dims:?}"),
                got: self.dims().to_vec(),
            });
        }
        let value = self.moved(|x| Ok(x.broadcast_as(dims)?.contiguous()?))?;
        let like = super::arith::Like::of(self);
        Ok(Self::record(value, "broadcast_as", [self], move |g, _| {
            Ok([Some(like.cotangent(g)?)])
        }))
    }
}
