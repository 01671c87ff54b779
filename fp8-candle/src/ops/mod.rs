//! Differentiable building blocks of transformers.
//!
//! Most of candle-nn's versions have no backward pass: everything upstream of them gets no gradient, without an error. These
//! are differentiable in every tensor argument.
//!
//! Common rules:
//! - The dtypes are f32, bf16, f16 and f64. 16-bit tensors are computed in f32 and rounded once, at the end; a gradient has
//!   the dtype of its argument.
//! - Strided inputs are made contiguous. Empty tensors give empty results. NaN and Inf spread as the formula says. Nothing
//!   panics.
//! - Each op is fused on the CPU and, except for f64, on CUDA devices with the feature `cuda`; its bits depend neither on the
//!   number of threads nor on alignment. Elsewhere it is composed of candle's primitives. So are [`dropout()`], [`embedding()`],
//!   [`max_pool2d`] and [`split()`] on every device, [`linear()`] and [`to_dtype`] on all but the CPU, and [`attention()`] where it has
//!   no kernels.
//! - Nothing is copied from a device to the host, except the targets of [`linear_cross_entropy()`] with an index to ignore, which it
//!   counts, and the FP8 codes of a cache on another device than the CPU.

mod activation;
pub(crate) mod attention;
mod cached_attention;
mod convert;
pub(crate) mod cross_entropy;
pub mod detached;
pub(crate) mod dropout;
pub mod elements;
mod embedding;
pub(crate) mod fake_quant;
mod linear;
mod linear_cross_entropy;
mod max_pool;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod softmax;
mod split;
mod wide;

pub use crate::base::activation::{Activation, UnknownActivation};
pub use crate::base::data::attention_products::AttentionProducts;
pub use activation::{gelu, swiglu};
pub use attention::{AttentionDropout, AttentionOptions, attention, attention_tokens_first};
pub use cached_attention::{CachedSequence, CachedTokens, cached_attention, cached_attention_each};
pub use convert::to_dtype;
pub use cross_entropy::{CrossEntropyOptions, cross_entropy, cross_entropy_with};
pub use dropout::dropout;
pub use embedding::embedding;
pub use linear::{LinearOptions, linear, linear_with, multiplies_bf16};
pub use linear_cross_entropy::{LinearCrossEntropyOptions, linear_cross_entropy};
pub use max_pool::max_pool2d;
pub use norm::{layer_norm, rms_norm};
pub use rope::{rope, rope_i};
pub use softmax::{causal_softmax, softmax_last_dim};
pub use split::split;

use crate::base::error::Result;
use candle_core::{Tensor, Var};
pub(crate) use elements::wide_dtype;

/// Whether there is a fused form for the dtype and device of `x`.
pub(crate) fn fused(x: &Tensor) -> bool {
    crate::device::has_fused_ops(x.device(), x.dtype())
}

/// The gradients of the arguments of `f`, given that of its result: by candle's graph, in the dtype in which kernels compute.
///
/// # Errors
/// The errors of `f`; if shapes do not fit.
pub fn gradients<const N: usize>(
    args: [&Tensor; N],
    grad: &Tensor,
    f: impl FnOnce([&Tensor; N]) -> Result<Tensor>,
) -> Result<[Tensor; N]> {
    let wide = |x: &Tensor| x.to_dtype(wide_dtype(x.dtype()));
    let vars = args
        .iter()
        .map(|x| Var::from_tensor(&wide(x)?))
        .collect::<candle_core::Result<Vec<_>>>()?;
    let y = f(std::array::from_fn(|i| vars[i].as_tensor()))?;
    // Collected separately: an outer collection must not see these variables.
    let found = crate::graph::backward(&(y * wide(grad)?)?.sum_all()?)?;
    let of = |var: &Var| match found.get(var) {
        Some(grad) => Ok(grad.clone()),
        None => var.zeros_like(),
    };
    let grads = vars
        .iter()
        .map(of)
        .collect::<candle_core::Result<Vec<_>>>()?;
    match <[Tensor; N]>::try_from(grads) {
        Ok(grads) => Ok(grads),
        Err(grads) => crate::base::error::internal!("{} gradients of {N} arguments", grads.len()),
    }
}

#[cfg(test)]
mod test_support {
    use crate::base::error::Result;
    use candle_core::{DType, Tensor, Var};
    use fp8_test_support::approx::{Approx, additions, assert_within};
    use fp8_test_support::flat64;
    use fp8_test_support::models::Model;
    pub(super) use fp8_test_support::wave;

    pub(super) const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

    /// The result and the gradients of all arguments in `dtype`, computed by the kernel and composed of candle's operations, are
    /// both as close to the exact ones as `model` says.
    pub(super) fn assert_same_as_composed(
        dtype: DType,
        args: &[Tensor],
        model: &Model,
        fused: impl Fn(&[Tensor]) -> Result<Tensor>,
        composed: impl Fn(&[Tensor]) -> Result<Tensor>,
    ) -> Result<()> {
        let vars = args
            .iter()
            .map(|a| Ok(Var::from_tensor(&a.to_dtype(dtype)?)?))
            .collect::<Result<Vec<_>>>()?;
        let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
        let values: Vec<Vec<f64>> = tensors.iter().map(flat64).collect();
        // candle adds the terms of a row in an order of its own, one by one at most.
        let row = args[0].dims().last().copied().unwrap_or(1);
        let in_any_order = row.div_ceil(additions(row)) as f64;
        type Way<'a> = (&'a str, &'a dyn Fn(&[Tensor]) -> Result<Tensor>, f64);
        let ways: [Way<'_>; 2] = [
            ("fused", &fused, 1.0),
            ("composed", &composed, in_any_order),
        ];
        for (way, op, factor) in ways {
            let y = op(&tensors)?;
            let weights = wave(y.dims(), 11).to_dtype(y.dtype())?;
            let mut expected = vec![model.forward(&values)];
            expected.extend(model.backward(&values, &flat64(&weights), dtype));
            let grads = (&y * weights)?.sum_all()?.backward()?;
            let mut got = vec![y];
            for (i, var) in vars.iter().enumerate() {
                let grad = grads.get(var);
                got.push(
                    grad.unwrap_or_else(|| panic!("argument {i} has no gradient"))
                        .clone(),
                );
            }
            for (i, (got, expected)) in got.iter().zip(&expected).enumerate() {
                let case = format!("{way}, result {i} (0: forward)");
                let wider = |x: &Approx| Approx {
                    error: x.error * factor,
                    ..*x
                };
                let expected: Vec<Approx> = expected.iter().map(wider).collect();
                assert_within(&flat64(got), &expected, got.dtype(), &case);
            }
        }
        Ok(())
    }
}
