//! What the four convolutions of candle_nn have in common.

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

macro_rules! kernels {
    ($(
        $type:ident: $config:ident {
            transposed: $transposed:literal,
            output_padding: $padding:expr,
            groups: $groups:expr,
            plain: $plain:expr,
            scaled: $scaled:expr,
        }
    )*) => {$(
        impl Kernel for candle_nn::$type {
            type Config = candle_nn::$config;

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
                let groups: usize = $groups(self.config());
                match $transposed {
                    true => (groups == 1).then_some(1),
                    false => Some(0),
                }
            }

            fn plain(&self, x: &Tensor) -> Result<Tensor> {
                Ok($plain(self, x)?)
            }

            fn fp8(&self, x: &Tensor, weight: ConvWeight<'_>, plan: &LinearPlan) -> Result<Tensor> {
                let shape = shape(self.config(), $padding, $groups);
                Ok(fp8_conv(ConvKind::$type, x, weight, self.bias(), &shape, plan)?)
            }

            fn scaled(&self, x: &Scaled, weight: &Scaled) -> Result<Scaled> {
                let shape = shape(self.config(), $padding, $groups);
                Ok($scaled(x, weight, self.config(), &shape)?)
            }
        }

        impl Config for candle_nn::$config {
            fn common(&self) -> [usize; 3] {
                [self.padding, self.stride, self.dilation]
            }
        }
    )*};
}

/// The sizes that every configuration has.
trait Config {
    /// Padding, stride, dilation.
    fn common(&self) -> [usize; 3];
}

fn shape<C: Config>(
    config: &C,
    output_padding: impl Fn(&C) -> usize,
    groups: impl Fn(&C) -> usize,
) -> ConvShape {
    let [padding, stride, dilation] = config.common();
    ConvShape::square(padding, stride, dilation, groups(config))
        .with_output_padding([output_padding(config); 2])
}

kernels! {
    Conv1d: Conv1dConfig {
        transposed: false,
        output_padding: |_: &candle_nn::Conv1dConfig| 0,
        groups: |config: &candle_nn::Conv1dConfig| config.groups,
        plain: one_dim::conv1d,
        scaled: |x: &Scaled, weight, c: &candle_nn::Conv1dConfig, _: &_| {
            x.conv1d(weight, c.padding, c.stride, c.dilation, c.groups)
        },
    }
    Conv2d: Conv2dConfig {
        transposed: false,
        output_padding: |_: &candle_nn::Conv2dConfig| 0,
        groups: |config: &candle_nn::Conv2dConfig| config.groups,
        plain: Module::forward,
        scaled: |x: &Scaled, weight, c: &candle_nn::Conv2dConfig, _: &_| {
            x.conv2d(weight, c.padding, c.stride, c.dilation, c.groups)
        },
    }
    ConvTranspose1d: ConvTranspose1dConfig {
        transposed: true,
        output_padding: |config: &candle_nn::ConvTranspose1dConfig| config.output_padding,
        groups: |config: &candle_nn::ConvTranspose1dConfig| config.groups,
        plain: one_dim::conv_transpose1d,
        scaled: |x: &Scaled, weight, _: &_, shape| x.conv_transpose1d(weight, shape),
    }
    ConvTranspose2d: ConvTranspose2dConfig {
        transposed: true,
        output_padding: |config: &candle_nn::ConvTranspose2dConfig| config.output_padding,
        groups: |_: &candle_nn::ConvTranspose2dConfig| 1,
        plain: Module::forward,
        scaled: |x: &Scaled, weight, _: &_, shape| x.conv_transpose2d(weight, shape),
    }
}
