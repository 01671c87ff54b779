//! Operations outside any graph, for crates with their own graph: results, and gradients as functions of the gradient of the
//! result. Some take a factor for their input, so that data with a scale need not be multiplied first.

pub use super::dropout::mask as dropout_mask;
pub use super::gradients;
pub use super::norm::{backward as norm_gradients, forward as norm};
pub use super::softmax::{backward as softmax_gradient, forward as softmax};

use super::activation::{scaled_curve, scaled_slope};
use super::attention::AttentionOptions;
use super::cross_entropy::{self, CrossEntropyOptions};
use crate::base::activation::Activation;
use crate::base::data::attention::Attention;
use crate::base::data::storage::tensor_of;
use crate::base::error::Result;
use crate::cast::tensor::Fp8Tensor;
use crate::device::{GemmOutput, backend};
use candle_core::{DType, Tensor};
use fp8_core::Contraction;

/// The function of the gate of `activation` (of its input, if it is not gated) at the values `scale * data`, divided by `scale`, in
/// the dtype of `data`.
///
/// # Errors
/// If `data` are not f32, bf16, f16 or f64.
pub fn activation(activation: Activation, data: &Tensor, scale: f64) -> Result<Tensor> {
    scaled_curve(activation.name(), activation.curve(), data, scale)
}

/// `grad` times the slope of [`activation`]'s function at the values `scale * data`.
///
/// # Errors
/// If `data` are not f32, bf16, f16 or f64, or `grad` does not have their shape, dtype and device.
pub fn activation_gradient(
    activation: Activation,
    data: &Tensor,
    scale: f64,
    grad: &Tensor,
) -> Result<Tensor> {
    scaled_slope(activation.name(), activation.curve(), data, scale, grad)
}

/// [`ops::attention`](super::attention()) of q, k and v, or [`attention_tokens_first`](super::attention_tokens_first), in `dtype`: that of q
/// or f32. With it comes the function from a gradient of the result to those gradients of q, k and v that are wanted, in its dtype.
///
/// # Errors
/// As [`ops::attention`](super::attention()).
#[expect(clippy::type_complexity, reason = "a closure's type")]
pub fn attention(
    qkv: [&Tensor; 3],
    options: &AttentionOptions,
    tokens_first: bool,
    dtype: DType,
) -> Result<(
    Tensor,
    impl Fn(&Tensor, [bool; 3]) -> Result<[Option<Tensor>; 3]> + Send + Sync + use<>,
)> {
    let attention = Attention::new(qkv, options, tokens_first)?;
    let qkv = qkv.map(Tensor::detach);
    let (y, saved) = attention.forward(qkv.each_ref(), dtype, true)?;
    let gradients =
        move |grad: &Tensor, wanted| attention.backward(qkv.each_ref(), &saved, grad, wanted);
    Ok((y, gradients))
}

/// [`ops::cross_entropy_with`](super::cross_entropy_with) of `logits_scale * logits`. With it comes the function from `factor` to
/// `factor` times the gradient of the loss with respect to `logits_scale * logits`, in the dtype of the logits.
///
/// # Errors
/// As [`ops::cross_entropy`](super::cross_entropy()).
pub fn cross_entropy(
    logits: &Tensor,
    logits_scale: f64,
    targets: &Tensor,
    options: CrossEntropyOptions,
) -> Result<(Tensor, impl Fn(f64) -> Result<Tensor> + Send + Sync + use<>)> {
    let (loss, kept) = cross_entropy::forward(logits, logits_scale, targets, options)?;
    let logits = logits.detach();
    let gradient = move |factor| kept.backward(&logits, logits_scale, factor);
    Ok((loss, gradient))
}

/// `a b + bias`, `[a.kept, b.kept]` in `dtype`, of two FP8 matrices, where `a` is tensorwise and its dequant_scale is multiplied by `factor`:
/// sums in f32, to which the scales are applied, rounded once before the bias is added.
///
/// # Errors
/// If the shapes do not fit, `a` is not tensorwise, or a device fails.
pub fn fp8_product(
    (a, a_contraction): (&Fp8Tensor, Contraction),
    (b, b_contraction): (&Fp8Tensor, Contraction),
    bias: Option<&Tensor>,
    factor: f32,
    dtype: DType,
) -> Result<Tensor> {
    let a = a.with_dequant_factor(factor)?;
    let (a, b) = (a.operand(a_contraction), b.operand(b_contraction));
    let out = GemmOutput {
        dtype,
        bias,
        use_fast_accum: false,
    };
    let storage = backend(a.dequant_scale.device())?.gemm(&a, &b, &out)?;
    tensor_of(storage, (a.kept(), b.kept()))
}
