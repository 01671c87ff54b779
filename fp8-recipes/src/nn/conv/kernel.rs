//! The interface that the four convolutions of candle_nn share.

use super::one_dim;
use crate::error::Result;
use candle_core::{Module, Tensor};
use fp8_candle::LinearPlan;
use fp8_candle::conv::{ConvKind, ConvShape, ConvWeight, fp8_conv};
use fp8_scaled::Scaled;

/// A convolution of candle_nn: its parameters and sizes, and what computes it.
pub trait Kernel: Clone + std::fmt::Debug {
    /// Padding, stride, dilation and groups.
    type Config: Copy;

    /// Which convolution it is, in spans.
    #[doc(hidden)]
    const KIND: &'static str;

    /// The layer with these parameters and sizes.
    fn build(weight: Tensor, bias: Option<Tensor>, config: Self::Config) -> Self;

    /// The same sizes with other parameters.
    fn rebuild(&self, weight: Tensor, bias: Option<Tensor>) -> Self;

    /// Weight and bias.
    fn parameters(&self) -> (&Tensor, Option<&Tensor>);

    /// (out_features, in_features) of the weight as a matrix.
    fn features(&self) -> (usize, usize);

    /// The dimension of the weight that has the output channels; None where groups share it.
    fn output_dim(&self) -> Option<usize>;

    /// Padding, stride, dilation, groups and output padding, as the FP8 kernels take them.
    #[doc(hidden)]
    fn shape(&self) -> ConvShape;

    /// In high precision, with gradients.
    #[doc(hidden)]
    fn plain(&self, x: &Tensor) -> Result<Tensor>;

    /// In FP8.
    #[doc(hidden)]
    fn fp8(&self, x: &Tensor, weight: ConvWeight<'_>, plan: &LinearPlan) -> Result<Tensor>;

    /// On a scaled tensor, without the bias.
    #[doc(hidden)]
    fn scaled(&self, x: &Scaled, weight: &Scaled) -> Result<Scaled>;
}

/// Each convolution: its name in spans; whether it is transposed; output padding and groups by its configuration `$c`; the functions
/// that compute it.
macro_rules! kernels {
    ($(
        $type:ident($kind:literal, $transposed:literal):
            |$c:ident: $config:ident| ($padding:expr, $groups:expr),
        plain: $plain:expr,
        scaled: |$x:ident, $weight:ident, $own:ident, $shape:ident| $scaled:expr;
    )*) => {$(
        impl Kernel for candle_nn::$type {
            type Config = candle_nn::$config;

            const KIND: &'static str = $kind;

            fn build(weight: Tensor, bias: Option<Tensor>, config: Self::Config) -> Self {
                Self::new(weight, bias, config)
            }

            fn rebuild(&self, weight: Tensor, bias: Option<Tensor>) -> Self {
                Self::new(weight, bias, *self.config())
            }

            fn parameters(&self) -> (&Tensor, Option<&Tensor>) {
                (self.weight(), self.bias())
            }

            fn features(&self) -> (usize, usize) {
                let (first, rest) = match self.weight().dims() {
                    [first, rest @ ..] => (*first, rest.iter().product()),
                    [] => (0, 0),
                };
                // Transposed, the first dimension is summed over.
                if $transposed { (rest, first) } else { (first, rest) }
            }

            fn output_dim(&self) -> Option<usize> {
                match $transposed {
                    true => (self.shape().groups == 1).then_some(1),
                    false => Some(0),
                }
            }

            fn shape(&self) -> ConvShape {
                let $c = self.config();
                ConvShape::square($c.padding, $c.stride, $c.dilation, $groups).with_output_padding([$padding; 2])
            }

            fn plain(&self, x: &Tensor) -> Result<Tensor> {
                Ok($plain(self, x)?)
            }

            fn fp8(&self, x: &Tensor, weight: ConvWeight<'_>, plan: &LinearPlan) -> Result<Tensor> {
                let shape = self.shape();
                Ok(fp8_conv(ConvKind::$type, x, weight, self.bias(), &shape, plan)?)
            }

            fn scaled(&self, $x: &Scaled, $weight: &Scaled) -> Result<Scaled> {
                let ($own, $shape) = (self.config(), &self.shape());
                Ok($scaled?)
            }
        }
    )*};
}

kernels! {
    Conv1d("conv1d", false):
        |c: Conv1dConfig| (0, c.groups),
    plain: one_dim::conv1d,
    scaled: |x, weight, c, _shape| x.conv1d(weight, c.padding, c.stride, c.dilation, c.groups);

    Conv2d("conv2d", false):
        |c: Conv2dConfig| (0, c.groups),
    plain: Module::forward,
    scaled: |x, weight, c, _shape| x.conv2d(weight, c.padding, c.stride, c.dilation, c.groups);

    ConvTranspose1d("conv-transpose1d", true):
        |c: ConvTranspose1dConfig| (c.output_padding, c.groups),
    plain: one_dim::conv_transpose1d,
    scaled: |x, weight, _c, shape| x.conv_transpose1d(weight, shape);

    ConvTranspose2d("conv-transpose2d", true):
        |c: ConvTranspose2dConfig| (c.output_padding, 1),
    plain: Module::forward,
    scaled: |x, weight, _c, shape| x.conv_transpose2d(weight, shape);
}
