//! A batch norm folded into the convolution before it.

use crate::nn::Conv2d;
use candle_core::{DType, Result, Tensor};
use fp8_scaled::Parameter;

/// `conv` followed by `bn` in evaluation, as one convolution for inference: weight
/// `[out_channels, in_channels / groups, height, width]` and bias in the dtype of `conv`'s weight, under `conv`'s path.
///
/// Computed in f32 (f64 for an f64 weight); a scaled weight gives an f32 one. The result is detached, so training continues with
/// the two layers. Its outputs differ from theirs by the rounding of the products.
///
/// # Errors
/// If `bn` has another number of features than `conv` has output channels.
///
/// ```
/// # use fp8_recipes as fp8;
/// # use candle_core::{DType, Device, Module, Tensor};
/// # use candle_nn::{VarBuilder, VarMap};
/// use fp8::nn::{self, ModuleT};
/// # fn main() -> candle_core::Result<()> {
/// # let vars = VarMap::new();
/// # let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let conv = nn::conv2d_no_bias(2, 4, 3, Default::default(), vb.pp("conv"))?;
/// let bn = nn::batch_norm(4, 1e-5, vb.pp("bn"))?;
/// let x = Tensor::randn(0f32, 1., (1, 2, 8, 8), &Device::Cpu)?;
/// let two = bn.forward_t(&conv.forward(&x)?, false)?;
/// let one = nn::fuse_batch_norm(&conv, &bn)?.forward(&x)?;
/// let apart = (one - two)?.abs()?.flatten_all()?.max(0)?.to_scalar::<f32>()?;
/// assert!(apart < 1e-5);
/// # Ok(()) }
/// ```
pub fn fuse_batch_norm(conv: &Conv2d, bn: &candle_nn::BatchNorm) -> Result<Conv2d> {
    let (weight, bias) = folded(conv.weight(), conv.bias(), bn, 0)?;
    let fused = Conv2d::new(weight, Some(bias), *conv.config());
    Ok(match conv.path() {
        Some(path) => fused.with_path(path),
        None => fused,
    })
}

/// Weight and bias of a layer with `bn` folded in, detached, in the dtype of `weight`; `channels` is the dimension of the weight that
/// has the output channels.
pub(super) fn folded(
    weight: &Tensor,
    bias: Option<&Tensor>,
    bn: &candle_nn::BatchNorm,
    channels: usize,
) -> Result<(Tensor, Tensor)> {
    let weight = &Parameter::of(weight).value(DType::F32)?;
    let (features, found) = (bn.running_mean().dim(0)?, weight.dim(channels)?);
    if features != found {
        candle_core::bail!(
            "a batch norm of {features} features cannot follow a convolution of {found} output channels"
        );
    }
    let dtype = weight.dtype();
    let wide = match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    let widened = |t: &Tensor| Parameter::of(t).value(wide)?.detach().to_dtype(wide);
    let deviation = (widened(bn.running_var())? + bn.eps())?.sqrt()?;
    let (gain, shift) = match bn.weight_and_bias() {
        Some((gain, shift)) => (widened(gain)?, widened(shift)?),
        None => (deviation.ones_like()?, deviation.zeros_like()?),
    };
    let factor = gain.div(&deviation)?;
    let mean = widened(bn.running_mean())?;
    let offset = match bias {
        Some(bias) => (widened(bias)? - mean)?,
        None => mean.neg()?,
    };
    let bias = (shift + factor.mul(&offset)?)?.to_dtype(dtype)?;
    let mut along = vec![1; weight.rank()];
    along[channels] = found;
    let weight = widened(weight)?.broadcast_mul(&factor.reshape(along)?)?;
    Ok((weight.to_dtype(dtype)?, bias))
}
