//! The largest pixels of windows.

use crate::base::check::check_float;
use crate::base::data::storage::take_storage;
use crate::base::error::{Result, shape_error};
use crate::graph::{Ready, attach};
use candle_core::{D, DType, Tensor};

const OP: &str = "max_pool2d";

/// The largest element of each square of `size` pixels, differentiable. Squares do not overlap; incomplete ones at the edges are dropped.
/// A square with NaN gives NaN.
///
/// As in torch, the gradient goes to the largest element of each square: of several equal ones to the first, of NaN to the last. (The
/// gradient of candle's own `max_pool2d` is divided by `size` squared, and its result has NaN only if the first pixel has.)
///
/// # Shapes
/// `x` `[batch, channels, height, width]` of any float dtype; result `[batch, channels, height / size, width / size]`.
///
/// # Errors
/// If `x` has other dimensions, or `size` is 0 or larger than the image.
///
/// ```
/// use candle_core::{Device, Var};
/// let image = Var::new(&[[[[1f32, 4., 2., 0.], [3., 4., 5., 1.]]]], &Device::Cpu)?;
/// let y = fp8_candle::ops::max_pool2d(&image, 2)?;
/// assert_eq!(y.flatten_all()?.to_vec1::<f32>()?, [4., 5.]);
/// let grads = y.sum_all()?.backward()?;
/// let grad = grads.get(&image).unwrap().flatten_all()?.to_vec1::<f32>()?;
/// assert_eq!(grad, [0., 1., 0., 0., 0., 0., 1., 0.]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn max_pool2d(x: &Tensor, size: usize) -> Result<Tensor> {
    check_float(OP, "the images", x)?;
    let &[_, _, height, width] = x.dims() else {
        return Err(misfit(size, x));
    };
    if size == 0 || size > height || size > width {
        return Err(misfit(size, x));
    }
    let y = largest(&x.detach().contiguous()?, size)?;
    let shape = y.dims().to_vec();
    let result = Ready::new(take_storage(y)?, shape)?;
    attach(OP, [x], result, move |[x], y, grad| {
        Ok([Some(gradient(x, y, grad, size)?)])
    })
}

fn largest(images: &Tensor, size: usize) -> Result<Tensor> {
    // A GPU launches no empty grid.
    if images.elem_count() == 0 {
        let (batch, channels, height, width) = images.dims4()?;
        let shape = (batch, channels, height / size, width / size);
        return Ok(Tensor::zeros(shape, images.dtype(), images.device())?);
    }
    let y = images.max_pool2d(size)?;
    if !may_have_nan(images)? {
        return Ok(y);
    }
    let has_nan = images.ne(images)?.max_pool2d(size)?;
    Ok(has_nan.where_cond(&y.affine(0., f64::NAN)?, &y)?)
}

fn misfit(size: usize, x: &Tensor) -> crate::base::error::Error {
    let expected = format!("[batch, channels, height, width] with windows of {size}");
    shape_error(OP, "the images", expected, x.dims())
}

/// Whether a value may be NaN. Their sum then is, which is faster to find out than which one it is; but only the host can look without
/// waiting for a device.
fn may_have_nan(values: &Tensor) -> Result<bool> {
    if !values.device().is_cpu() {
        return Ok(true);
    }
    let sum = values.sum_all()?.to_dtype(DType::F64)?;
    Ok(sum.to_scalar::<f64>()?.is_nan())
}

fn gradient(x: &Tensor, y: &Tensor, grad: &Tensor, size: usize) -> Result<Tensor> {
    if x.elem_count() == 0 {
        return Ok(x.zeros_like()?);
    }
    let (batch, channels, height, width) = x.dims4()?;
    let (rows, cols) = (height / size, width / size);
    let images = batch * channels;
    let inside = x.detach().narrow(2, 0, rows * size)?;
    let inside = inside.narrow(3, 0, cols * size)?.contiguous()?;
    let windows = inside
        .reshape((images, rows, size, cols, size))?
        .transpose(2, 3)?
        .reshape((images, rows, cols, size * size))?;
    // Places are counted from 1: 0 stands for none.
    let places = Tensor::arange(1u32, (size * size) as u32 + 1, x.device())?;
    let mut largest = (windows.argmax_keepdim(D::Minus1)? + 1.)?;
    // A window with NaN has given NaN, and there are fewer results than pixels.
    if may_have_nan(y)? {
        let of_nan = windows.ne(&windows)?.to_dtype(DType::U32)?;
        let of_nan = of_nan.broadcast_mul(&places)?;
        let last = of_nan.max_keepdim(D::Minus1)?;
        largest = last.gt(0u32)?.where_cond(&last, &largest)?;
    }
    let is_largest = largest.broadcast_eq(&places)?;
    let grad = grad.reshape((images, rows, cols, 1))?;
    let grad = grad.broadcast_as(is_largest.shape())?.contiguous()?;
    let grad = is_largest.where_cond(&grad, &grad.zeros_like()?)?;
    let grad = grad
        .reshape((images, rows, cols, size, size))?
        .transpose(2, 3)?
        .reshape((batch, channels, rows * size, cols * size))?;
    let grad = grad.pad_with_zeros(2, 0, height - rows * size)?;
    Ok(grad.pad_with_zeros(3, 0, width - cols * size)?)
}
