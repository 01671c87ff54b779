//! Convolutions.

use super::arith::{Like, common_dtype};
use super::check::check_same_device;
use super::error::{Result, shape};
use super::kernels::convert;
use super::matmul::{both_codes, cotangent, operand};
use super::options::Options;
use super::value::Scaled;
use candle_core::{DType, Tensor};
use fp8_candle::conv::{BareConv, BareOperand, ConvShape};
use fp8_candle::ops::detached::gradients;
use fp8_core::scaled::{Factored, matmul_rule};

impl Scaled {
    /// The convolution of images `[batch, channels, height, width]` with `kernel` `[out, channels / groups, height, width]`. Scale:
    /// `image * kernel * r(sqrt(n))` for sums of n products. The conditions for FP8 are those of [`Scaled::matmul`].
    ///
    /// # Errors
    /// If the shapes do not fit or the devices differ.
    pub fn conv2d(
        &self,
        kernel: &Self,
        padding: usize,
        stride: usize,
        dilation: usize,
        groups: usize,
    ) -> Result<Self> {
        let shape = ConvShape::square(padding, stride, dilation, groups);
        self.convolved("conv2d", kernel, shape, false)
    }

    /// The convolution of rows `[batch, channels, length]` with `kernel` `[out, channels / groups, length]`, as
    /// [`Scaled::conv2d`].
    ///
    /// # Errors
    /// If the shapes do not fit or the devices differ.
    pub fn conv1d(
        &self,
        kernel: &Self,
        padding: usize,
        stride: usize,
        dilation: usize,
        groups: usize,
    ) -> Result<Self> {
        let shape = ConvShape::square(padding, stride, dilation, groups);
        one_dim("conv1d", self, kernel, |x, kernel| {
            x.convolved("conv1d", kernel, shape.along_width(), false)
        })
    }

    /// The transposed convolution of `[batch, in, height, width]` with `kernel` `[in, out / groups, height, width]`, the gradient of
    /// [`Scaled::conv2d`] with respect to its image. Scale: `image * kernel * r(sqrt(n))` for sums of at most n products: `in / groups`
    /// times the kernel taps that reach one position of the result.
    ///
    /// # Errors
    /// If the shapes do not fit or the devices differ.
    pub fn conv_transpose2d(&self, kernel: &Self, shape: &ConvShape) -> Result<Self> {
        self.convolved("conv_transpose2d", kernel, *shape, true)
    }

    /// [`Scaled::conv_transpose2d`] along one dimension: `[batch, in, length]` with `kernel` `[in, out / groups, length]`. Only the
    /// entries of `shape` for the width apply.
    ///
    /// # Errors
    /// If the shapes do not fit or the devices differ.
    pub fn conv_transpose1d(&self, kernel: &Self, shape: &ConvShape) -> Result<Self> {
        let shape = shape.along_width();
        one_dim("conv_transpose1d", self, kernel, |x, kernel| {
            x.convolved("conv_transpose1d", kernel, shape, true)
        })
    }

    fn convolved(
        &self,
        op: &'static str,
        kernel: &Self,
        shape: ConvShape,
        transposed: bool,
    ) -> Result<Self> {
        check_same_device(op, self, kernel)?;
        let x_dims = four(op, "the image", self)?;
        let kernel_dims = four(op, "the kernel", kernel)?;
        let conv = match transposed {
            true => BareConv::transposed(x_dims, kernel_dims, &shape),
            false => BareConv::new(x_dims, kernel_dims, &shape),
        };
        let conv = conv.map_err(|source| fp8_candle::Error::Conv {
            path: op.into(),
            source,
        })?;
        let length = match transposed {
            true => fan_in(kernel_dims, &shape),
            false => conv.lengths()[1],
        };
        let products = Products { op, conv, shape };
        let dtype = common_dtype(self, kernel);
        let (x, w) = (operand(self)?, operand(kernel)?);
        // The roles of image and result are swapped in a transposed convolution.
        let value = match transposed {
            true => products.grad_input(&x, &w, length, dtype)?,
            false => products.output(&x, &w, dtype)?,
        };
        let (x_like, w_like) = (Like::of(self), Like::of(kernel));
        let parents = [self, kernel];
        Ok(Self::record(
            value,
            op,
            parents,
            move |g, [want_x, want_w]| {
                let g = cotangent(g)?;
                let (output, image) = if transposed { (&x, &g) } else { (&g, &x) };
                let grad_x = || match transposed {
                    true => products.output(&g, &w, x_like.dtype()),
                    false => products.grad_input(&g, &w, length, x_like.dtype()),
                };
                let grad_w = || products.grad_weight(output, image, &w_like);
                Ok([
                    want_x.then(grad_x).transpose()?,
                    want_w.then(grad_w).transpose()?,
                ])
            },
        ))
    }
}

/// The most terms that a value of a transposed convolution sums.
fn fan_in([n, _, height, width]: [usize; 4], shape: &ConvShape) -> usize {
    let taps = |dim: usize, kernel: usize| {
        // One in so many taps reaches the same position.
        let (stride, dilation) = (shape.stride[dim].max(1), shape.dilation[dim]);
        let (mut a, mut b) = (stride, dilation);
        while b > 0 {
            (a, b) = (b, a % b);
        }
        kernel.div_ceil(stride / a)
    };
    n / shape.groups.max(1) * taps(0, height) * taps(1, width)
}

fn four(op: &'static str, what: &'static str, x: &Scaled) -> Result<[usize; 4]> {
    match *x.dims() {
        [a, b, c, d] => Ok([a, b, c, d]),
        _ => Err(shape(op, what, "four dimensions", x.dims())),
    }
}

/// Applies `f` to rows as images of height 1.
fn one_dim(
    op: &'static str,
    x: &Scaled,
    kernel: &Scaled,
    f: impl FnOnce(&Scaled, &Scaled) -> Result<Scaled>,
) -> Result<Scaled> {
    for (what, x) in [("the rows", x), ("the kernel", kernel)] {
        if x.rank() != 3 {
            return Err(shape(op, what, "three dimensions", x.dims()));
        }
    }
    f(&x.unsqueeze(2)?, &kernel.unsqueeze(2)?)?.squeeze(2)
}

/// The products of a convolution with the rules of their scales.
struct Products {
    op: &'static str,
    conv: BareConv,
    shape: ConvShape,
}

impl Products {
    /// The rule of the product of `a` and `b` with sums of `length` terms.
    fn rule(a: &Scaled, b: &Scaled, length: usize) -> Factored {
        let options = Options::current();
        options.count_matmul(both_codes(a, b).is_some());
        matmul_rule(a.scale(), b.scale(), length, options.round())
    }

    /// Applies `f` to both operands in the form in which they are multiplied.
    fn multiply(
        a: &Scaled,
        b: &Scaled,
        f: impl FnOnce(BareOperand<'_>, BareOperand<'_>) -> fp8_candle::Result<Tensor>,
    ) -> Result<Tensor> {
        match both_codes(a, b) {
            Some((a, b)) => Ok(f(BareOperand::Codes(a), BareOperand::Codes(b))?),
            None => {
                let (a, b) = (a.float(DType::F32)?, b.float(DType::F32)?);
                Ok(f(BareOperand::Values(&a), BareOperand::Values(&b))?)
            }
        }
    }

    fn output(&self, x: &Scaled, w: &Scaled, dtype: DType) -> Result<Scaled> {
        let [length, ..] = self.conv.lengths();
        let rule = Self::rule(x, w, length);
        let data = match dtype {
            DType::F64 => {
                let y = self.in_f64(&x.float(dtype)?, &w.float(dtype)?)?;
                convert(self.op, &y, rule.data_factor, dtype)?
            }
            _ => Self::multiply(x, w, |x, w| self.conv.output(x, w, rule.data_factor, dtype))?,
        };
        Scaled::new(data, rule.scale).zeroed()
    }

    /// The gradient of the input, whose values sum at most `length` terms.
    fn grad_input(&self, g: &Scaled, w: &Scaled, length: usize, dtype: DType) -> Result<Scaled> {
        let rule = Self::rule(g, w, length);
        let data = match dtype {
            DType::F64 => {
                // The convolution is linear in its images.
                let x = Tensor::zeros(&self.conv.image_dims()[..], dtype, g.device())?;
                let (g, w) = (g.float(dtype)?, w.float(dtype)?);
                let [grad] = gradients([&x], &g, |[x]| self.in_f64(x, &w))?;
                convert(self.op, &grad, rule.data_factor, dtype)?
            }
            _ => Self::multiply(g, w, |g, w| {
                self.conv.grad_input(g, w, rule.data_factor, dtype)
            })?,
        };
        Scaled::new(data, rule.scale).zeroed()
    }

    fn grad_weight(&self, g: &Scaled, x: &Scaled, like: &Like) -> Result<Scaled> {
        let [.., length] = self.conv.lengths();
        let rule = Self::rule(g, x, length);
        let data = match like.dtype() {
            DType::F64 => {
                let w = Tensor::zeros(like.dims(), DType::F64, g.device())?;
                let (g, x) = (g.float(DType::F64)?, x.float(DType::F64)?);
                let [grad] = gradients([&w], &g, |[w]| self.in_f64(&x, w))?;
                grad
            }
            _ => Self::multiply(g, x, |g, x| self.conv.grad_weight(g, x))?,
        };
        let data = data.reshape(like.dims())?;
        let data = convert(self.op, &data, rule.data_factor, like.dtype())?;
        Scaled::new(data, rule.scale).zeroed()
    }

    /// The convolution in f64, tap by tap: the products above compute in f32, and candle's convolution has no gradient for images whose
    /// size is not a multiple of the stride.
    fn in_f64(&self, x: &Tensor, w: &Tensor) -> fp8_candle::Result<Tensor> {
        let shape = &self.shape;
        let [above, left] = shape.padding;
        let x = (x.pad_with_zeros(2, above, above)?).pad_with_zeros(3, left, left)?;
        let [batch, n, height, width] = self.conv.output_dims();
        let (_, channels, kernel_height, kernel_width) = w.dims4()?;
        let places = |dim: usize, tap: usize, count: usize| -> fp8_candle::Result<Tensor> {
            let ids: Vec<u32> = (0..count)
                .map(|place| (tap * shape.dilation[dim] + place * shape.stride[dim]) as u32)
                .collect();
            Ok(Tensor::new(ids, x.device())?)
        };
        let per_group = n / shape.groups;
        let groups = (0..shape.groups).map(|group| -> fp8_candle::Result<Tensor> {
            let x = x.narrow(1, group * channels, channels)?.contiguous()?;
            let w = w.narrow(0, group * per_group, per_group)?;
            let mut sum = Tensor::zeros((batch, per_group, height * width), x.dtype(), x.device())?;
            for row in 0..kernel_height {
                let rows = x.index_select(&places(0, row, height)?, 2)?;
                for col in 0..kernel_width {
                    let taps = rows.index_select(&places(1, col, width)?, 3)?;
                    let taps = taps.reshape((batch, channels, height * width))?;
                    let w = w.narrow(2, row, 1)?.narrow(3, col, 1)?;
                    let w = w.reshape((1, per_group, channels))?;
                    sum = (sum + w.broadcast_matmul(&taps)?)?;
                }
            }
            Ok(sum.reshape((batch, per_group, height, width))?)
        });
        Ok(Tensor::cat(
            &groups.collect::<fp8_candle::Result<Vec<_>>>()?,
            1,
        )?)
    }
}
