//! The forward pass: checks, casts, and the node of the autograd graph.

use super::geometry::Geometry;
use super::op::{ConvOp, Convolution};
use super::operand::Weight;
use super::shape::ConvShape;
use super::values::Values;
use crate::base::data::storage::{take_storage, tensor_of};
use crate::base::error::{Error, Result};
use crate::cast::weight_cache::WeightCache;
use crate::cast::weight_version::Seen;
use crate::graph::Ready;
use crate::layers::linear::{LinearPlan, Saved, recast};
use candle_core::{DType, Tensor};
use fp8_core::Granularity;

/// The weight of a convolution in high precision, quantized in the call.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::conv::{ConvShape, ConvWeight, fp8_conv2d};
/// use fp8_candle::{LinearPlan, WeightCache};
///
/// let x = Tensor::ones((1, 3, 8, 8), DType::F32, &Device::Cpu)?;
/// let weight = Tensor::ones((4, 3, 3, 3), DType::F32, &Device::Cpu)?;
/// // The cache keeps the codes until the weight changes.
/// let cache = WeightCache::default();
/// let weight = ConvWeight::new(&weight).with_cache(&cache);
/// let y = fp8_conv2d(&x, weight, None, &ConvShape::new(), &LinearPlan::new("conv"))?;
/// assert_eq!(y.dims(), [1, 4, 6, 6]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct ConvWeight<'a> {
    /// f32, bf16 or f16.
    pub tensor: &'a Tensor,
    /// Keeps the codes until the weight changes.
    pub cache: Option<&'a WeightCache>,
}

impl<'a> ConvWeight<'a> {
    /// A weight that is cast in every call.
    pub fn new(tensor: &'a Tensor) -> Self {
        Self {
            tensor,
            cache: None,
        }
    }

    /// The same weight with a cache for its codes.
    pub fn with_cache(self, cache: impl Into<Option<&'a WeightCache>>) -> Self {
        Self {
            cache: cache.into(),
            ..self
        }
    }
}

impl<'a> From<&'a Tensor> for ConvWeight<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::new(tensor)
    }
}

/// One of the four functions.
#[derive(Clone, Copy)]
struct Kind {
    name: &'static str,
    transposed: bool,
    /// Dimensions besides batch and channels.
    dims: usize,
    input: &'static str,
    weight: &'static str,
}

/// `y = conv2d(x, weight) + bias` with FP8 products, see [`crate::layers::conv`].
///
/// # Shapes
/// x `[B, C, H, W]`, weight `[N, C / groups, kh, kw]`, bias `[N]`, result `[B, N, Ho, Wo]` with the sizes of
/// [`ConvShape::output_size`].
///
/// # Dtypes
/// x, weight and bias are each f32, bf16 or f16; the result and grad_x have x's dtype, the other gradients that of their
/// tensor. Bias is added in the output dtype. A product without a plan runs in f32.
///
/// # Errors
/// [`Error::Conv`] if the sizes make no convolution; if a dtype, a device or a number of dimensions does not fit.
///
/// # Examples
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use fp8_candle::conv::{ConvShape, fp8_conv2d};
/// use fp8_candle::{GemmPlan, LinearPlan, Quantizer};
/// use fp8_core::{Format, Granularity};
///
/// let x = Tensor::randn(0f32, 1.0, (2, 3, 16, 16), &Device::Cpu)?;
/// let weight = Var::randn(0f32, 1.0, (8, 3, 3, 3), &Device::Cpu)?;
///
/// let cast = |format| Quantizer::dynamic(format, Granularity::Tensorwise);
/// let plan = LinearPlan::new("conv")
///     .with_output(GemmPlan::new(cast(Format::E4M3), cast(Format::E4M3)))
///     .with_grad_weight(GemmPlan::new(cast(Format::E5M2), cast(Format::E4M3)));
/// let shape = ConvShape::new().with_padding([1, 1]).with_stride([2, 2]);
/// let y = fp8_conv2d(&x, weight.as_tensor(), None, &shape, &plan)?;
/// assert_eq!(y.dims(), [2, 8, 8, 8]);
/// let grads = y.sqr()?.sum_all()?.backward()?;
/// assert_eq!(grads.get(&weight).unwrap().dims(), weight.dims());
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fp8_conv2d<'a>(
    x: &Tensor,
    weight: impl Into<ConvWeight<'a>>,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let kind = Kind {
        name: "fp8_conv2d",
        transposed: false,
        dims: 2,
        input: "[batch, channels, height, width]",
        weight: "[out_channels, in_channels / groups, height, width]",
    };
    convolve(kind, x, weight.into(), bias, shape, plan)
}

/// [`fp8_conv2d`] along one dimension: x `[B, C, L]`, weight `[N, C / groups, k]`, result `[B, N, Lo]`. Of `shape` it uses
/// what belongs to the width.
///
/// # Errors
/// As for [`fp8_conv2d`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::LinearPlan;
/// use fp8_candle::conv::{ConvShape, fp8_conv1d};
///
/// let x = Tensor::new(&[[[1f32, 2.0, 3.0, 4.0]]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[[1f32, -1.0]]], &Device::Cpu)?;
/// let y = fp8_conv1d(&x, &weight, None, &ConvShape::new(), &LinearPlan::new("conv"))?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[-1.0, -1.0, -1.0]]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fp8_conv1d<'a>(
    x: &Tensor,
    weight: impl Into<ConvWeight<'a>>,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let kind = Kind {
        name: "fp8_conv1d",
        transposed: false,
        dims: 1,
        input: "[batch, channels, length]",
        weight: "[out_channels, in_channels / groups, length]",
    };
    convolve(kind, x, weight.into(), bias, &shape.along_width(), plan)
}

/// The transposed convolution, the gradient of [`fp8_conv2d`] with respect to its input: x `[B, N, H, W]`, weight
/// `[N, C / groups, kh, kw]`, bias `[C]`, result `[B, C, Ho, Wo]` with the sizes of [`ConvShape::transposed_output_size`].
///
/// Dtypes are as for [`fp8_conv2d`].
///
/// # Errors
/// As for [`fp8_conv2d`].
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::LinearPlan;
/// use fp8_candle::conv::{ConvShape, fp8_conv_transpose2d};
///
/// let x = Tensor::ones((1, 4, 8, 8), DType::F32, &Device::Cpu)?;
/// let weight = Tensor::ones((4, 3, 2, 2), DType::F32, &Device::Cpu)?;
/// let shape = ConvShape::new().with_stride([2, 2]);
/// let y = fp8_conv_transpose2d(&x, &weight, None, &shape, &LinearPlan::new("up"))?;
/// assert_eq!(y.dims(), [1, 3, 16, 16]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fp8_conv_transpose2d<'a>(
    x: &Tensor,
    weight: impl Into<ConvWeight<'a>>,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let kind = Kind {
        name: "fp8_conv_transpose2d",
        transposed: true,
        dims: 2,
        input: "[batch, channels, height, width]",
        weight: "[in_channels, out_channels / groups, height, width]",
    };
    convolve(kind, x, weight.into(), bias, shape, plan)
}

/// [`fp8_conv_transpose2d`] along one dimension: x `[B, N, L]`, weight `[N, C / groups, k]`, result `[B, C, Lo]`. Of
/// `shape` it uses what belongs to the width.
///
/// # Errors
/// As for [`fp8_conv2d`].
///
/// ```
/// use candle_core::{Device, Tensor};
/// use fp8_candle::LinearPlan;
/// use fp8_candle::conv::{ConvShape, fp8_conv_transpose1d};
///
/// let x = Tensor::new(&[[[1f32, 2.0]]], &Device::Cpu)?;
/// let weight = Tensor::new(&[[[1f32, -1.0]]], &Device::Cpu)?;
/// let y = fp8_conv_transpose1d(&x, &weight, None, &ConvShape::new(), &LinearPlan::new("up"))?;
/// assert_eq!(y.to_vec3::<f32>()?, [[[1.0, 1.0, -2.0]]]);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fp8_conv_transpose1d<'a>(
    x: &Tensor,
    weight: impl Into<ConvWeight<'a>>,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let kind = Kind {
        name: "fp8_conv_transpose1d",
        transposed: true,
        dims: 1,
        input: "[batch, channels, length]",
        weight: "[in_channels, out_channels / groups, length]",
    };
    convolve(kind, x, weight.into(), bias, &shape.along_width(), plan)
}

fn convolve(
    kind: Kind,
    x: &Tensor,
    weight: ConvWeight<'_>,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let convolution = check(kind, x, weight.tensor, bias, shape, plan)?;
    let [batch, channels, height, width] = convolution.output_dims();
    let out_dims = match kind.dims {
        1 => vec![batch, channels, width],
        _ => vec![batch, channels, height, width],
    };
    let bias_data = bias.map(Tensor::detach);
    let x_data = x.detach().contiguous()?;
    let mut saved = Saved::default();
    let (x_values, w_values, how) = match &plan.output {
        None => {
            saved.seen = x.track_op().then(|| Seen::of(weight.tensor)).transpose()?;
            (
                Values::high_precision(&x_data)?,
                Values::high_precision(&weight.tensor.detach().to_dtype(x.dtype())?)?,
                (true, false),
            )
        }
        Some(gemm) => {
            let x8 = Values::images(&x_data, &gemm.a)?;
            let geometry = &convolution.geometry;
            let (contraction, granularity) =
                (convolution.forward_contraction(), gemm.b.spec.granularity);
            let matrix = Weight::matrix(weight.tensor, geometry, granularity, contraction)?;
            // Scales of a group's own lie in another order for the other contraction.
            let same = granularity == Granularity::Tensorwise || geometry.groups == 1;
            let rereads = x.track_op() && (plan.rereads_weight() || !same);
            let (w8, seen) = match weight.cache {
                Some(cache) => {
                    let (w8, seen) =
                        cache.quantize_as(weight.tensor, &matrix, &gemm.b, contraction, false)?;
                    (w8, rereads.then_some(seen))
                }
                None => {
                    let seen = rereads.then(|| Seen::of(weight.tensor)).transpose()?;
                    (gemm.b.quantize(&matrix, contraction)?.tensor, seen)
                }
            };
            saved.seen = seen;
            let w8 = Values::Fp8(w8);
            let for_x = (x.track_op() && same, x8.clone());
            saved.keep(plan, gemm, for_x, (weight.tensor.track_op(), w8.clone()));
            (x8, w8, (plan.emulate, gemm.use_fast_accum))
        }
    };
    let y = convolution.output(x_values, &w_values, bias_data.as_ref(), x.dtype(), how)?;
    let y = match &plan.results.output {
        None => y,
        cast => take_storage(recast(tensor_of(y, out_dims.as_slice())?, cast.as_ref())?)?,
    };
    let op = ConvOp {
        convolution,
        plan: plan.clone(),
        saved,
    };
    op.attach(kind.name, Ready::new(y, out_dims)?, x, weight.tensor, bias)
}

/// Checks dtypes, devices and sizes.
fn check(
    kind: Kind,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Convolution> {
    let tensors = [("x", Some(x)), ("weight", Some(weight)), ("bias", bias)];
    for (what, tensor) in tensors {
        let Some(tensor) = tensor else { continue };
        if !matches!(tensor.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            return Err(Error::DType {
                op: kind.name,
                what,
                expected: "f32, bf16 or f16",
                got: tensor.dtype(),
            });
        }
        if !tensor.device().same_device(weight.device()) {
            return Err(Error::DeviceMismatch {
                op: kind.name,
                what,
                expected: weight.device().location(),
                got: tensor.device().location(),
            });
        }
    }
    let sizes = |what, tensor: &Tensor, expected: &str| match (kind.dims, tensor.dims()) {
        (1, &[a, b, length]) => Ok([a, b, 1, length]),
        (2, &[a, b, height, width]) => Ok([a, b, height, width]),
        _ => Err(Error::Shape {
            op: kind.name,
            what,
            expected: expected.to_string(),
            got: tensor.dims().to_vec(),
        }),
    };
    let (x, weight) = (
        sizes("x", x, kind.input)?,
        sizes("weight", weight, kind.weight)?,
    );
    let window = match kind.transposed {
        false => shape.window(x, weight),
        true => shape.transposed_window(x, weight),
    };
    let convolution = Convolution {
        geometry: Geometry {
            window: window.map_err(|source| Error::Conv {
                path: plan.path.to_string(),
                source,
            })?,
            n: weight[0],
            groups: shape.groups,
        },
        transposed: kind.transposed,
    };
    let [_, channels, ..] = convolution.output_dims();
    if let Some(bias) = bias.filter(|bias| bias.dims() != [channels]) {
        return Err(Error::Shape {
            op: kind.name,
            what: "bias",
            expected: format!("[{channels}]"),
            got: bias.dims().to_vec(),
        });
    }
    Ok(convolution)
}
