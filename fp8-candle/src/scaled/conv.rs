//! Convolutions.

use super::arith::{Like, check_same_device, common_dtype};
use super::kernels::convert;
use super::matmul::{both_codes, cotangent, operand};
use super::options::Options;
use super::value::Scaled;
use crate::conv::{BareConv, BareOperand, ConvShape};
use crate::error::{Error, Result};
use crate::ops::gradients;
use candle_core::{DType, Tensor};
use fp8_core::scaled::{Factored, matmul_rule};

impl Scaled {
    /// The convolution of images `[batch, channels, height, width]` with `kernel` `[out, channels / groups, height, width]`. Scale:
    /// `image * kernel * r(sqrt(n))` for sums of n products. In FP8 as [`Scaled::matmul`].
    ///
    /// # Errors
    /// If the shapes do not fit or the devices differ.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use fp8_candle::scaled::as_scaled;
    /// let image = as_scaled(&Tensor::ones((1, 1, 4, 4), DType::F16, &Device::Cpu)?, 2.0)?;
    /// let kernel = as_scaled(&Tensor::ones((1, 1, 4, 4), DType::F16, &Device::Cpu)?, None)?;
    /// let y = image.conv2d(&kernel, 0, 1, 1, 1)?;
    /// assert_eq!((y.scale().to_f32(), y.to_scalar()?), (8.0, 16.0)); // 2 * 4, the root of 16
    /// # Ok::<(), fp8_candle::Error>(())
    /// ```
    pub fn conv2d(
        &self,
        kernel: &Self,
        padding: usize,
        stride: usize,
        dilation: usize,
        groups: usize,
    ) -> Result<Self> {
        let op = "conv2d";
        check_same_device(op, self, kernel)?;
        let sizes = |what: &'static str, x: &Self| match *x.dims() {
            [a, b, c, d] => Ok([a, b, c, d]),
            _ => Err(Error::Shape {
                op,
                what,
                expected: "four dimensions".into(),
                got: x.dims().to_vec(),
            }),
        };
        let shape = ConvShape::new()
            .with_padding([padding; 2])
            .with_stride([stride; 2])
            .with_dilation([dilation; 2])
            .with_groups(groups);
        let conv = BareConv::new(
            sizes("the image", self)?,
            sizes("the kernel", kernel)?,
            &shape,
        );
        let products = Products {
            conv: conv.map_err(|source| Error::Conv {
                path: op.into(),
                source,
            })?,
            shape,
        };
        let dtype = common_dtype(self, kernel);
        let (x, w) = (operand(self)?, operand(kernel)?);
        let value = products.output(&x, &w, dtype)?;
        let (x_like, w_like) = (Like::of(self), Like::of(kernel));
        Ok(Self::record(
            value,
            op,
            [self, kernel],
            move |g, [want_x, want_w]| {
                let g = cotangent(g)?;
                let grad_x = || products.grad_input(&g, &x, &w, x_like.dtype());
                let grad_w = || products.grad_weight(&g, &x, &w, &w_like);
                Ok([
                    want_x.then(grad_x).transpose()?,
                    want_w.then(grad_w).transpose()?,
                ])
            },
        ))
    }
}

/// The products with their rules.
struct Products {
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

    /// `f` of both operands as they are multiplied.
    fn multiply(
        a: &Scaled,
        b: &Scaled,
        f: impl FnOnce(BareOperand<'_>, BareOperand<'_>) -> Result<Tensor>,
    ) -> Result<Tensor> {
        match both_codes(a, b) {
            Some((a, b)) => f(BareOperand::Codes(a), BareOperand::Codes(b)),
            None => {
                let (a, b) = (a.float(DType::F32)?, b.float(DType::F32)?);
                f(BareOperand::Values(&a), BareOperand::Values(&b))
            }
        }
    }

    fn output(&self, x: &Scaled, w: &Scaled, dtype: DType) -> Result<Scaled> {
        let [length, ..] = self.conv.lengths();
        let rule = Self::rule(x, w, length);
        let data = match dtype {
            DType::F64 => {
                let y = self.in_f64(&x.float(dtype)?, &w.float(dtype)?)?;
                convert("conv2d", &y, rule.data_factor, dtype)?
            }
            _ => Self::multiply(x, w, |x, w| self.conv.output(x, w, rule.data_factor, dtype))?,
        };
        Scaled::new(data, rule.scale).zeroed()
    }

    fn grad_input(&self, g: &Scaled, x: &Scaled, w: &Scaled, dtype: DType) -> Result<Scaled> {
        let [_, length, _] = self.conv.lengths();
        let rule = Self::rule(g, w, length);
        let data = match dtype {
            DType::F64 => {
                let [grad, _] = self.gradients_in_f64(g, x, w)?;
                convert("conv2d", &grad, rule.data_factor, dtype)?
            }
            _ => Self::multiply(g, w, |g, w| {
                self.conv.grad_input(g, w, rule.data_factor, dtype)
            })?,
        };
        Scaled::new(data, rule.scale).zeroed()
    }

    fn grad_weight(&self, g: &Scaled, x: &Scaled, w: &Scaled, like: &Like) -> Result<Scaled> {
        let [.., length] = self.conv.lengths();
        let rule = Self::rule(g, x, length);
        let data = match like.dtype() {
            DType::F64 => self.gradients_in_f64(g, x, w)?[1].clone(),
            _ => Self::multiply(g, x, |g, x| self.conv.grad_weight(g, x))?,
        };
        let data = data.reshape(like.dims())?;
        let data = convert("conv2d", &data, rule.data_factor, like.dtype())?;
        Scaled::new(data, rule.scale).zeroed()
    }

    /// Tap by tap: the products above are in f32, and candle's convolution has no gradient for images that a stride does not
    /// divide.
    fn in_f64(&self, x: &Tensor, w: &Tensor) -> Result<Tensor> {
        let shape = &self.shape;
        let ([padding, _], [stride, _], [dilation, _]) =
            (shape.padding, shape.stride, shape.dilation);
        let x = (x.pad_with_zeros(2, padding, padding)?).pad_with_zeros(3, padding, padding)?;
        let [batch, n, height, width] = self.conv.output_dims();
        let (_, channels, kernel_height, kernel_width) = w.dims4()?;
        let places = |tap: usize, count: usize| -> Result<Tensor> {
            let ids: Vec<u32> = (0..count)
                .map(|place| (tap * dilation + place * stride) as u32)
                .collect();
            Ok(Tensor::new(ids, x.device())?)
        };
        let per_group = n / shape.groups;
        let groups = (0..shape.groups).map(|group| -> Result<Tensor> {
            let x = x.narrow(1, group * channels, channels)?.contiguous()?;
            let w = w.narrow(0, group * per_group, per_group)?;
            let mut sum = Tensor::zeros((batch, per_group, height * width), x.dtype(), x.device())?;
            for row in 0..kernel_height {
                let rows = x.index_select(&places(row, height)?, 2)?;
                for col in 0..kernel_width {
                    let taps = rows.index_select(&places(col, width)?, 3)?;
                    let taps = taps.reshape((batch, channels, height * width))?;
                    let w = w.narrow(2, row, 1)?.narrow(3, col, 1)?;
                    let w = w.reshape((1, per_group, channels))?;
                    sum = (sum + w.broadcast_matmul(&taps)?)?;
                }
            }
            Ok(sum.reshape((batch, per_group, height, width))?)
        });
        Ok(Tensor::cat(&groups.collect::<Result<Vec<_>>>()?, 1)?)
    }

    fn gradients_in_f64(&self, g: &Scaled, x: &Scaled, w: &Scaled) -> Result<[Tensor; 2]> {
        let wide = DType::F64;
        let (g, x, w) = (g.float(wide)?, x.float(wide)?, w.float(wide)?);
        gradients([&x, &w], &g, |[x, w]| self.in_f64(x, w))
    }
}
