//! A convolution in a guard.

use crate::autocast::{Context, Mode, current, linear_plan};
use crate::error::Result;
use crate::nn::calibrate::calibrate;
use crate::nn::shared_state::SharedState;
use candle_core::Tensor;
use fp8_candle::LinearPlan;
use fp8_candle::conv::{ConvKind, ConvShape, ConvWeight, fp8_conv};

/// The sizes of candle-nn's layers, and what computes them in FP8.
pub(super) trait Sizes {
    fn parameters(&self) -> (&Tensor, Option<&Tensor>);

    fn shape(&self) -> ConvShape;

    /// (out_features, in_features) of the weight as a matrix.
    fn features(&self) -> (usize, usize);

    /// The dimension of the weight that has the output channels; None where groups share it.
    fn output_dim(&self) -> Option<usize>;

    fn fp8(&self, x: &Tensor, weight: ConvWeight<'_>, plan: &LinearPlan) -> Result<Tensor>;
}

macro_rules! sizes {
    ($($type:ident, $transposed:literal, $padding:expr, $groups:expr;)*) => {
        $(
            impl Sizes for candle_nn::$type {
                fn parameters(&self) -> (&Tensor, Option<&Tensor>) {
                    (self.weight(), self.bias())
                }

                fn shape(&self) -> ConvShape {
                    let config = self.config();
                    let (padding, groups): (usize, usize) = ($padding(config), $groups(config));
                    ConvShape::new()
                        .with_padding([config.padding; 2])
                        .with_output_padding([padding; 2])
                        .with_stride([config.stride; 2])
                        .with_dilation([config.dilation; 2])
                        .with_groups(groups)
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

                fn fp8(
                    &self,
                    x: &Tensor,
                    weight: ConvWeight<'_>,
                    plan: &LinearPlan,
                ) -> Result<Tensor> {
                    let kind = ConvKind::$type;
                    Ok(fp8_conv(kind, x, weight, self.bias(), &self.shape(), plan)?)
                }
            }
        )*
    };
}

sizes! {
    Conv1d, false, |_| 0, |config: &candle_nn::Conv1dConfig| config.groups;
    Conv2d, false, |_| 0, |config: &candle_nn::Conv2dConfig| config.groups;
    ConvTranspose1d, true,
        |config: &candle_nn::ConvTranspose1dConfig| config.output_padding,
        |config: &candle_nn::ConvTranspose1dConfig| config.groups;
    ConvTranspose2d, true,
        |config: &candle_nn::ConvTranspose2dConfig| config.output_padding, |_| 1;
}

/// The layer in FP8 where a guard says so and it is prepared; else `plain`.
pub(super) fn forward(
    layer: &impl Sizes,
    state: (&SharedState, Option<&str>),
    x: &Tensor,
    plain: impl Fn() -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(context) = current() else {
        return plain();
    };
    let y = in_context(layer, state, x, plain, &context);
    if y.is_err() {
        context.note_failure();
    }
    y
}

fn in_context(
    layer: &impl Sizes,
    (state, path): (&SharedState, Option<&str>),
    x: &Tensor,
    plain: impl Fn() -> Result<Tensor>,
    context: &Context,
) -> Result<Tensor> {
    let signed_in = match state.get() {
        Some(state) => context.sign_in(&state)?.map(|step| (state, step)),
        None => {
            context.note_unprepared(path);
            None
        }
    };
    let Some((state, step)) = signed_in else {
        return plain();
    };
    let (weight, _) = layer.parameters();
    if context.settings.mode == Mode::Calibrate {
        calibrate(&state, &step, x, || Ok(weight.clone()))?;
        return plain();
    }
    let plan = linear_plan(&state, &step)?;
    layer.fp8(x, ConvWeight::new(weight).with_cache(&state.cache), &plan)
}
