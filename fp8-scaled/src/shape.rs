//! Operations that move elements: the scale stays.

use super::check::{check_dim, misfit};
use super::error::{Result, shape};
use super::value::{Data, Scaled};
use candle_core::Tensor;
use fp8_candle::Fp8Tensor;

impl Scaled {
    /// Applies `f` to the tensor of data or codes; the scale stays, and the result has no graph.
    pub(super) fn moved(&self, f: impl Fn(&Tensor) -> Result<Tensor>) -> Result<Self> {
        match &self.data {
            Data::Float(data) => {
                self.check_origin()?;
                Ok(Self::new(f(data)?, self.scale()))
            }
            Data::Fp8(data) => {
                let codes = f(data.codes())?.contiguous()?;
                let moved = Fp8Tensor::from_parts(
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

    /// The same values in row-major memory. No operation needs it; one copy may serve several operations that read row by row.
    pub fn contiguous(&self) -> Result<Self> {
        let value = self.moved(|x| Ok(x.contiguous()?))?;
        Ok(self.recorded(value, "contiguous", |g| Ok(g.detach())))
    }

    /// The same elements in another shape.
    ///
    /// # Errors
    /// If the number of elements differs.
    pub fn reshape(&self, dims: &[usize]) -> Result<Self> {
        let count = (dims.iter()).try_fold(1usize, |count, &size| count.checked_mul(size));
        if count != Some(self.elem_count()) {
            return Err(shape(
                "reshape",
                "the operand",
                format!("as many elements as {dims:?}"),
                self.dims(),
            ));
        }
        let value = self.moved(|x| Ok(x.reshape(dims)?))?;
        let from = self.dims().to_vec();
        Ok(self.recorded(value, "reshape", move |g| g.reshape(&from)))
    }

    /// Repeats elements along dimensions of size 1, and along new ones in front.
    ///
    /// # Errors
    /// If the shape does not broadcast to `dims`.
    pub fn broadcast_as(&self, dims: &[usize]) -> Result<Self> {
        if super::arith::broadcast_dims("broadcast_as", self.dims(), dims)? != dims {
            return Err(shape(
                "broadcast_as",
                "the operand",
                format!("a shape that broadcasts to {dims:?}"),
                self.dims(),
            ));
        }
        let value = self.moved(|x| Ok(x.broadcast_as(dims)?.contiguous()?))?;
        let like = super::arith::Like::of(self);
        Ok(self.recorded(value, "broadcast_as", move |g| like.cotangent(g)))
    }

    /// The same elements in one dimension.
    pub fn flatten_all(&self) -> Result<Self> {
        self.reshape(&[self.elem_count()])
    }

    /// The same elements without the dimension `dim`, which has the size 1.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if the size is not 1.
    pub fn squeeze(&self, dim: usize) -> Result<Self> {
        check_dim("squeeze", self, dim)?;
        let mut dims = self.dims().to_vec();
        match dims.remove(dim) {
            1 => self.reshape(&dims),
            _ => misfit("squeeze", self, format!("size 1 of dimension {dim}")),
        }
    }

    /// The same elements with a new dimension of size 1 at `dim`.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if there are fewer than `dim` dimensions.
    pub fn unsqueeze(&self, dim: usize) -> Result<Self> {
        if dim > self.rank() {
            return misfit("unsqueeze", self, format!("{dim} dimensions or more"));
        }
        let mut dims = self.dims().to_vec();
        dims.insert(dim, 1);
        self.reshape(&dims)
    }

    /// Dimensions in another order: dimension i of the result is dimension `dims[i]`.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if `dims` does not name each dimension once.
    pub fn permute(&self, dims: &[usize]) -> Result<Self> {
        let mut inverse = vec![usize::MAX; self.rank()];
        for (i, &dim) in dims.iter().enumerate() {
            if let Some(place) = inverse.get_mut(dim) {
                *place = i;
            }
        }
        if dims.len() != self.rank() || inverse.contains(&usize::MAX) {
            return misfit(
                "permute",
                self,
                format!("the dimensions {dims:?}, each once"),
            );
        }
        let value = self.moved(|x| Ok(x.permute(dims)?))?;
        Ok(self.recorded(value, "permute", move |g| g.permute(&inverse)))
    }

    /// Exchanges two dimensions.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if one does not exist.
    pub fn transpose(&self, a: usize, b: usize) -> Result<Self> {
        check_dim("transpose", self, a)?;
        check_dim("transpose", self, b)?;
        let mut dims: Vec<usize> = (0..self.rank()).collect();
        dims.swap(a, b);
        self.permute(&dims)
    }

    /// `len` elements from `start` along a dimension.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if there are fewer.
    pub fn narrow(&self, dim: usize, start: usize, len: usize) -> Result<Self> {
        let op = "narrow";
        check_dim(op, self, dim)?;
        let size = self.dims()[dim];
        let Some(after) = start.checked_add(len).and_then(|end| size.checked_sub(end)) else {
            return misfit(
                op,
                self,
                format!("{len} elements from {start} along dimension {dim}"),
            );
        };
        let value = self.moved(|x| Ok(x.narrow(dim, start, len)?))?;
        Ok(self.recorded(value, op, move |g| g.pad(dim, start, after)))
    }

    /// Adds zeros before and after the elements of a dimension.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if the dimension does not exist.
    pub fn pad(&self, dim: usize, before: usize, after: usize) -> Result<Self> {
        check_dim("pad", self, dim)?;
        let size = self.dims()[dim];
        let value = self.moved(|x| Ok(x.pad_with_zeros(dim, before, after)?))?;
        Ok(self.recorded(value, "pad", move |g| g.narrow(dim, before, size)))
    }

    /// Every `step`th element of `start..end` along a dimension.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if the range is not within the dimension, or the step is 0.
    pub fn slice(&self, dim: usize, start: usize, end: usize, step: usize) -> Result<Self> {
        let op = "slice";
        check_dim(op, self, dim)?;
        let size = self.dims()[dim];
        if start > end || end > size || step == 0 {
            return misfit(
                op,
                self,
                format!(
                    "elements {start}..{end} along dimension {dim}, and a step above 0 (it is {step})"
                ),
            );
        }
        let count = (end - start).div_ceil(step);
        if step == 1 || count <= 1 {
            return self.narrow(dim, start, count);
        }
        let ids = (start..end).step_by(step).map(|i| i as u32);
        let ids = Tensor::from_iter(ids, self.device())?;
        let value = self.moved(|x| Ok(x.contiguous()?.index_select(&ids, dim)?))?;
        Ok(self.recorded(value, op, move |g| {
            // Insert zeros between the elements: they are moved, never added.
            let (mut apart, covered) = (g.dims().to_vec(), (count - 1) * step + 1);
            apart[dim] = count * step;
            let g = g.detach().unsqueeze(dim + 1)?.pad(dim + 1, 0, step - 1)?;
            let g = g.reshape(&apart)?.narrow(dim, 0, covered)?;
            g.pad(dim, start, size - start - covered)
        }))
    }

    /// Elements in the opposite order along a dimension.
    ///
    /// # Errors
    /// [`fp8_candle::Error::Shape`] if the dimension does not exist.
    pub fn reverse(&self, dim: usize) -> Result<Self> {
        check_dim("reverse", self, dim)?;
        let value = self.moved(|x| Ok(x.contiguous()?.flip(&[dim])?))?;
        Ok(self.recorded(value, "reverse", move |g| g.reverse(dim)))
    }
}
