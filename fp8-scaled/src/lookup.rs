//! Selection by indices.

use super::arith::Like;
use super::check::check_dim;
use super::error::{Result, shape};
use super::kernels::convert;
use super::value::Scaled;
use candle_core::Tensor;
use fp8_candle::ops::elements::wide_dtype;

impl Scaled {
    /// The slices along `dim` at `ids`, a tensor of one dimension of U8, U32 or I64. Scale: that of the input. Gradients of a slice
    /// that is taken several times are summed in f32.
    ///
    /// # Errors
    /// If the dimension does not exist, or `ids` has not one dimension or has an index that is too large.
    pub fn index_select(&self, ids: &Tensor, dim: usize) -> Result<Self> {
        let op = "index_select";
        check_dim(op, self, dim)?;
        let ids = ids.detach().contiguous()?;
        let value = self.moved(|x| Ok(x.contiguous()?.index_select(&ids, dim)?))?;
        let like = Like::of(self);
        Ok(self.recorded(value, op, move |g| {
            summed(op, &like, g, |zeros, g| Ok(zeros.index_add(&ids, g, dim)?))
        }))
    }

    /// The elements along `dim` at `ids`, which has as many dimensions, as [`Tensor::gather`]. Scale: that of the input.
    ///
    /// # Errors
    /// If the shapes do not fit or an index is too large.
    pub fn gather(&self, ids: &Tensor, dim: usize) -> Result<Self> {
        let op = "gather";
        check_dim(op, self, dim)?;
        let ids = ids.detach().contiguous()?;
        let value = self.moved(|x| Ok(x.contiguous()?.gather(&ids, dim)?))?;
        let like = Like::of(self);
        Ok(self.recorded(value, op, move |g| {
            summed(
                op,
                &like,
                g,
                |zeros, g| Ok(zeros.scatter_add(&ids, g, dim)?),
            )
        }))
    }

    /// The rows of this table `[rows, d]` at `ids` of any shape: `[.., d]`. Scale: that of the table.
    ///
    /// # Errors
    /// If this has not two dimensions, or an index is too large.
    pub fn embedding(&self, ids: &Tensor) -> Result<Self> {
        let &[_, width] = self.dims() else {
            return Err(shape("embedding", "the table", "[rows, d]", self.dims()));
        };
        self.index_select(&ids.flatten_all()?, 0)?
            .reshape(&[ids.dims(), &[width]].concat())
    }
}

/// The sums that `add` makes in zeros of the argument's shape, in the dtype of computation, rounded once.
fn summed(
    op: &'static str,
    like: &Like,
    g: &Scaled,
    add: impl FnOnce(&Tensor, &Tensor) -> Result<Tensor>,
) -> Result<Scaled> {
    let wide = wide_dtype(like.dtype());
    let zeros = Tensor::zeros(like.dims(), wide, g.device())?;
    let sum = add(&zeros, &g.float(wide)?.contiguous()?)?;
    Scaled::new(convert(op, &sum, 1.0, like.dtype())?, g.scale()).zeroed()
}
