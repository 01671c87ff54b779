//! Cross entropy over integer targets.

mod composed;
mod cpu;
mod options;

pub use options::CrossEntropyOptions;

use super::fused;
use crate::base::check::{check_device, check_float, last_dim};
use crate::base::data::storage::tensor_of;
use crate::base::error::{Result, dtype_error, shape_error};
use crate::base::profile::{Kind, enter};
use crate::device::cpu::elements::{for_dtype, storage, tensor, with_slices};
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::cross_entropy as cuda;
use crate::graph::{Ready, attach};
use candle_core::{DType, Storage, Tensor};
use composed::{composed, to_i64};
pub(crate) use cpu::CheckedTargets;
use options::OP;

/// Mean negative log likelihood of integer targets under the softmax of `logits`.
///
/// ```text
/// loss = mean_i(log(sum_c exp(logits[i, c])) - logits[i, targets[i]])
/// ```
///
/// # Shapes
/// `logits` `[.., classes]` f32, bf16, f16 or f64; `targets` `[..]` of any integer dtype. The loss is a scalar,
/// f64 for f64 logits and f32 otherwise, and NaN if there are no positions.
///
/// # Targets that are not classes
/// On the CPU a target outside `0..classes` is an error. On other devices targets are not checked, since that would copy
/// them to the host and wait for the device: there the loss is NaN, and so are the gradients in the row of the target.
///
/// # Errors
/// [`Error::Target`](crate::Error::Target) on the CPU if a target is not in `0..classes`; or if shapes, dtypes or devices do not fit.
///
/// # Source
/// Bishop, "Pattern Recognition and Machine Learning", section 4.3.4, 2006.
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
///
/// // Two positions and four equal logits: the loss is ln 4.
/// let logits = Tensor::zeros((2, 4), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[0u32, 3], &Device::Cpu)?;
/// let loss = fp8_candle::ops::cross_entropy(&logits, &targets)?;
/// assert!((loss.to_scalar::<f32>()? - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, CrossEntropyOptions::default())
}

/// [`cross_entropy`] with options. If every position is ignored, the loss is NaN and the gradient 0.
///
/// # Errors
/// As [`cross_entropy`].
///
/// # Examples
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use fp8_candle::ops::{CrossEntropyOptions, cross_entropy_with};
///
/// let logits = Tensor::zeros((2, 4), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[0i64, -100], &Device::Cpu)?; // -100: padding
/// let options = CrossEntropyOptions::default().with_ignore_index(-100);
/// let loss = cross_entropy_with(&logits, &targets, options)?;
/// assert!((loss.to_scalar::<f32>()? - 4f32.ln()).abs() < 1e-6);
/// # Ok::<(), fp8_candle::Error>(())
/// ```
pub fn cross_entropy_with(
    logits: &Tensor,
    targets: &Tensor,
    options: CrossEntropyOptions,
) -> Result<Tensor> {
    let classes = check(logits, targets)?;
    if !fused(logits) {
        return composed(logits, &to_i64(targets)?, options);
    }
    let logits = logits.contiguous()?;
    #[cfg(feature = "cuda")]
    if logits.device().is_cuda() {
        return on_cuda(&logits, targets.contiguous()?, options);
    }
    let checked = CheckedTargets::new(targets, classes, options)?;
    let loss = loss(&logits, 1.0, &checked)?;
    attach(
        OP,
        [&logits],
        Ready::new(loss, ())?,
        move |[logits], _, grad| {
            let _scope = enter(Kind::Loss);
            let grad = grad.to_dtype(DType::F64)?.to_scalar::<f64>()?;
            let factor = grad / checked.counted() as f64;
            Ok([Some(gradient(logits, 1.0, &checked, factor)?)])
        },
    )
}

/// The loss of `logits_scale * logits` on the CPU.
fn loss(logits: &Tensor, logits_scale: f64, targets: &CheckedTargets) -> Result<Storage> {
    let _scope = enter(Kind::Loss);
    crate::base::simd::check()?;
    for_dtype!(OP, logits.dtype(), T => {
        with_slices([logits], |[x]: [&[T]; 1]| storage(vec![targets.forward(x, logits_scale)]))
    })
}

/// `factor` times the gradient of the sum of losses of `logits_scale * logits`, on the CPU.
fn gradient(
    logits: &Tensor,
    logits_scale: f64,
    targets: &CheckedTargets,
    factor: f64,
) -> Result<Tensor> {
    for_dtype!(OP, logits.dtype(), T => {
        with_slices([logits], |[x]: [&[T]; 1]| {
            tensor(targets.backward(x, logits_scale, factor), logits.shape())
        })?
    })
}

#[cfg(feature = "cuda")]
fn on_cuda(logits: &Tensor, targets: Tensor, options: CrossEntropyOptions) -> Result<Tensor> {
    fn with(values: &Tensor, options: CrossEntropyOptions) -> cuda::Targets<'_> {
        cuda::Targets {
            values,
            ignore_index: options.ignore_index,
        }
    }
    let (loss, saved) = {
        let _scope = enter(Kind::Loss);
        cuda::forward(logits, with(&targets, options))?
    };
    let result = Ready::new(loss, ())?;
    attach(OP, [logits], result, move |[logits], _, grad| {
        let _scope = enter(Kind::Loss);
        let (targets, grad) = (with(&targets, options), grad.contiguous()?);
        Ok([Some(cuda::backward(logits, targets, &saved, &grad)?)])
    })
}

/// The number of classes, if logits and targets fit each other.
fn check(logits: &Tensor, targets: &Tensor) -> Result<usize> {
    check_float(OP, "logits", logits)?;
    let classes = last_dim(OP, "logits", logits)?;
    check_targets(OP, targets, logits)?;
    Ok(classes)
}

/// Fails unless there is an integer target for each row of `x`, `[.., features]`.
pub(super) fn check_targets(op: &'static str, targets: &Tensor, x: &Tensor) -> Result<()> {
    check_device(op, "targets", targets, x.device())?;
    let positions = &x.dims()[..x.rank() - 1];
    if targets.dims() != positions {
        let expected = format!("{positions:?}");
        return Err(shape_error(op, "targets", expected, targets.dims()));
    }
    match targets.dtype() {
        dtype if dtype.is_float() => Err(dtype_error(op, "targets", "an integer dtype", dtype)),
        _ => Ok(()),
    }
}

/// [`cross_entropy_with`] of `logits_scale * logits` outside any graph, and what its gradient needs.
pub(crate) fn forward(
    logits: &Tensor,
    logits_scale: f64,
    targets: &Tensor,
    options: CrossEntropyOptions,
) -> Result<(Tensor, Kept)> {
    let classes = check(logits, targets)?;
    let (logits, targets) = (logits.detach(), targets.detach());
    if logits.device().is_cpu() {
        let checked = CheckedTargets::new(&targets, classes, options)?;
        let loss = loss(&logits, logits_scale, &checked)?;
        return Ok((tensor_of(loss, ())?, Kept::Checked(checked)));
    }
    let wide = logits.to_dtype(super::wide_dtype(logits.dtype()))?;
    let loss = cross_entropy_with(&(wide * logits_scale)?, &targets, options)?;
    Ok((loss, Kept::Targets(targets, options)))
}

/// What the gradient of [`forward`] needs beside the logits.
pub(crate) enum Kept {
    Checked(CheckedTargets),
    Targets(Tensor, CrossEntropyOptions),
}

impl Kept {
    /// `factor` times the gradient of `logits_scale * logits`, in the dtype of `logits`.
    pub(crate) fn backward(
        &self,
        logits: &Tensor,
        logits_scale: f64,
        factor: f64,
    ) -> Result<Tensor> {
        match self {
            Self::Checked(targets) => gradient(
                logits,
                logits_scale,
                targets,
                factor / targets.counted() as f64,
            ),
            Self::Targets(targets, options) => {
                let dtype = logits.dtype();
                let wide = (logits.to_dtype(super::wide_dtype(dtype))? * logits_scale)?;
                let grad = Tensor::new(factor, logits.device())?.to_dtype(wide.dtype())?;
                let [grad] = super::gradients([&wide], &grad, |[x]| {
                    cross_entropy_with(x, targets, *options)
                })?;
                Ok(grad.to_dtype(dtype)?)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};
    use candle_core::Device;
    use fp8_test_support::models::Model;

    #[test]
    fn fused_equals_composed() -> Result<()> {
        let classes: Vec<i64> = (0..260).map(|i| (i * 29) % 67).collect();
        let targets = Tensor::from_vec(classes.clone(), (4, 65), &Device::Cpu)?;
        let logits = (wave(&[4, 65, 67], 1) * 5.0)?;
        for dtype in DTYPES {
            for ignore_index in [None, Some(29), Some(-100)] {
                let options = CrossEntropyOptions { ignore_index };
                let counted = |class: &i64| match Some(*class) == ignore_index {
                    true => None,
                    false => Some(*class as usize),
                };
                let model = Model::CrossEntropy(classes.iter().map(counted).collect());
                assert_same_as_composed(
                    dtype,
                    std::slice::from_ref(&logits),
                    &model,
                    |a| cross_entropy_with(&a[0], &targets, options),
                    |a| composed(&a[0], &targets, options),
                )?;
            }
        }
        Ok(())
    }
}
