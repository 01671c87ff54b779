//! The forward pass: checks, casts, and the node of the autograd graph.

use super::backward::ConvOp;
use super::geometry::Geometry;
use super::operand::Weight;
use super::products::Convolution;
use super::shape::ConvShape;
use super::values::Values;
use crate::base::check::check_dims;
use crate::base::data::storage::{take_storage, tensor_of};
use crate::base::error::{Error, Result, shape_error};
use crate::cast::quantizer::recast;
use crate::cast::weight_cache::WeightCache;
use crate::cast::weight_version::Seen;
use crate::graph::Ready;
use crate::layers::linear::{LinearPlan, SavedCasts, check_operands, quantize_weight};
use candle_core::Tensor;
use fp8_core::Granularity;

/// The weight of a convolution in high precision, quantized in the call.
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

/// Which convolution [`fp8_conv`] computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ConvKind {
    /// x `[B, C, L]`, weight `[N, C / groups, k]`, bias `[N]`, result `[B, N, Lo]`.
    Conv1d,
    /// x `[B, C, H, W]`, weight `[N, C / groups, kh, kw]`, bias `[N]`, result `[B, N, Ho, Wo]`.
    Conv2d,
    /// The gradient of [`ConvKind::Conv1d`] with respect to its input: x `[B, N, L]`, weight `[N, C / groups, k]`, bias `[C]`,
    /// result `[B, C, Lo]`.
    ConvTranspose1d,
    /// The gradient of [`ConvKind::Conv2d`] with respect to its input: x `[B, N, H, W]`, weight `[N, C / groups, kh, kw]`, bias
    /// `[C]`, result `[B, C, Ho, Wo]`.
    ConvTranspose2d,
}

impl ConvKind {
    /// The name in messages.
    fn name(self) -> &'static str {
        match self {
            Self::Conv1d => "fp8_conv1d",
            Self::Conv2d => "fp8_conv2d",
            Self::ConvTranspose1d => "fp8_conv_transpose1d",
            Self::ConvTranspose2d => "fp8_conv_transpose2d",
        }
    }

    fn is_transposed(self) -> bool {
        matches!(self, Self::ConvTranspose1d | Self::ConvTranspose2d)
    }

    fn is_flat(self) -> bool {
        matches!(self, Self::Conv1d | Self::ConvTranspose1d)
    }

    /// Sizes of x and of the weight in messages.
    fn expected(self) -> [String; 2] {
        let (out, into) = match self.is_transposed() {
            false => ("out_channels", "in_channels"),
            true => ("in_channels", "out_channels"),
        };
        let sizes = if self.is_flat() {
            "length"
        } else {
            "height, width"
        };
        [
            format!("[batch, channels, {sizes}]"),
            format!("[{out}, {into} / groups, {sizes}]"),
        ]
    }
}

/// `y = conv(x, weight) + bias` with FP8 products, see [`crate::layers::conv`].
///
/// # Shapes
/// Those of [`ConvKind`], with the sizes of [`ConvShape::output_size`] or [`ConvShape::transposed_output_size`]. A convolution
/// along one dimension uses what belongs to the width in `shape`.
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
/// use fp8_candle::conv::{ConvKind, ConvShape, fp8_conv};
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
/// let y = fp8_conv(ConvKind::Conv2d, &x, weight.as_tensor(), None, &shape, &plan)?;
/// assert_eq!(y.dims(), [2, 8, 8, 8]);
/// let grads = y.sqr()?.sum_all()?.backward()?;
/// assert_eq!(grads.get(&weight).unwrap().dims(), weight.dims());
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn fp8_conv<'a>(
    kind: ConvKind,
    x: &Tensor,
    weight: impl Into<ConvWeight<'a>>,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Tensor> {
    let weight = weight.into();
    let shape = match kind.is_flat() {
        true => shape.along_width(),
        false => *shape,
    };
    let convolution = check(kind, x, weight.tensor, bias, &shape, plan)?;
    let [batch, channels, height, width] = convolution.output_dims();
    let out_dims = match kind.is_flat() {
        true => vec![batch, channels, width],
        false => vec![batch, channels, height, width],
    };
    let bias_data = bias.map(Tensor::detach);
    let x_data = x.detach().contiguous()?;
    let mut saved = SavedCasts::default();
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
            let (w8, seen) = quantize_weight(
                weight.cache,
                weight.tensor,
                &matrix,
                &gemm.b,
                contraction,
                false,
                rereads,
            )?;
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
    op.attach(
        kind.name(),
        Ready::new(y, out_dims)?,
        x,
        weight.tensor,
        bias,
    )
}

/// Checks dtypes, devices and sizes.
fn check(
    kind: ConvKind,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    shape: &ConvShape,
    plan: &LinearPlan,
) -> Result<Convolution> {
    check_operands(kind.name(), x, Some(weight), bias, weight.device())?;
    let sizes = |what, tensor: &Tensor, expected: String| match (kind.is_flat(), tensor.dims()) {
        (true, &[a, b, length]) => Ok([a, b, 1, length]),
        (false, &[a, b, height, width]) => Ok([a, b, height, width]),
        _ => Err(shape_error(kind.name(), what, expected, tensor.dims())),
    };
    let [for_x, for_weight] = kind.expected();
    let (x, weight) = (sizes("x", x, for_x)?, sizes("weight", weight, for_weight)?);
    let transposed = kind.is_transposed();
    let convolution = Convolution {
        geometry: Geometry::new(x, weight, shape, transposed).map_err(|source| Error::Conv {
            path: plan.path.to_string(),
            source,
        })?,
        transposed,
    };
    let [_, channels, ..] = convolution.output_dims();
    if let Some(bias) = bias {
        check_dims(kind.name(), "bias", bias, &[channels])?;
    }
    Ok(convolution)
}
