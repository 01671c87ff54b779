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
//!   number of threads nor on alignment. Elsewhere it is composed of candle's primitives.
//! - Nothing is copied from a device to the host.

mod activation;
pub(crate) mod add;
pub(crate) mod attention;
mod cached_attention;
pub(crate) mod cross_entropy;
pub mod detached;
pub(crate) mod dropout;
pub mod elements;
pub(crate) mod fake_quant;
mod few_rows;
pub(crate) mod norm;
pub(crate) mod rope;
pub(crate) mod softmax;
mod wide;

pub use crate::base::data::activation::{Activation, UnknownActivation};
pub use activation::{gelu, swiglu};
pub use attention::{AttentionDropout, AttentionOptions, attention, attention_tokens_first};
pub use cached_attention::{CachedTokens, cached_attention};
pub use cross_entropy::{CrossEntropyOptions, cross_entropy, cross_entropy_with};
pub use dropout::dropout;
pub use few_rows::few_rows_linear;
pub use norm::{layer_norm, rms_norm};
pub use rope::{rope, rope_i};
pub use softmax::{causal_softmax, softmax_last_dim};

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
    use candle_core::{DType, Device, Tensor, Var};

    pub(super) const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::BF16, DType::F16];

    /// f64 values in (-1, 1) without a pattern.
    pub(super) fn wave(shape: &[usize], seed: usize) -> Result<Tensor> {
        let n = shape.iter().product::<usize>();
        let values: Vec<f64> = (0..n)
            .map(|i| (((i + 7) * (seed * 2 + 9)) as f64 * 12.9898).sin())
            .collect();
        Ok(Tensor::from_vec(values, shape, &Device::Cpu)?)
    }

    /// Compares results and the gradients of all arguments in `dtype`, to a few roundings of the largest value.
    pub(super) fn assert_same_as_composed(
        dtype: DType,
        args: &[Tensor],
        fused: impl Fn(&[Tensor]) -> Result<Tensor>,
        composed: impl Fn(&[Tensor]) -> Result<Tensor>,
    ) -> Result<()> {
        let tolerance = match dtype {
            DType::F64 => 1e-13,
            DType::F32 => 2e-6,
            DType::F16 => 1e-3,
            _ => 8e-3,
        };
        let run = |op: &dyn Fn(&[Tensor]) -> Result<Tensor>| -> Result<Vec<Tensor>> {
            let vars = args
                .iter()
                .map(|a| Ok(Var::from_tensor(&a.to_dtype(dtype)?)?))
                .collect::<Result<Vec<_>>>()?;
            let tensors: Vec<Tensor> = vars.iter().map(|v| v.as_tensor().clone()).collect();
            let y = op(&tensors)?;
            let weights = wave(y.dims(), 11)?.to_dtype(y.dtype())?;
            let grads = (&y * weights)?.sum_all()?.backward()?;
            let mut out = vec![y];
            for (i, var) in vars.iter().enumerate() {
                match grads.get(var) {
                    Some(grad) => out.push(grad.clone()),
                    None => panic!("argument {i} has no gradient"),
                }
            }
            Ok(out)
        };
        for (i, (got, expected)) in run(&fused)?.iter().zip(run(&composed)?).enumerate() {
            assert_eq!(got.dtype(), expected.dtype(), "{dtype:?}, result {i}");
            assert_eq!(got.dims(), expected.dims(), "{dtype:?}, result {i}");
            let flat = |t: &Tensor| -> candle_core::Result<_> {
                t.to_dtype(DType::F64)?.flatten_all()?.to_vec1::<f64>()
            };
            let (got, expected) = (flat(got)?, flat(&expected)?);
            let largest = expected.iter().fold(0.0, |a: f64, b| a.max(b.abs()));
            for (got, expected) in got.iter().zip(&expected) {
                let error = (got - expected).abs();
                assert!(
                    error <= tolerance * largest,
                    "{dtype:?}, result {i} (0: forward): got {got}, expected {expected}, largest {largest}"
                );
            }
        }
        Ok(())
    }
}
