//! Cross entropy over integer targets.

mod composed;
mod cpu;

use super::data::{for_dtype, storage, tensor, with_slices};
use super::node::{Fused, apply1};
use super::{check_device, check_float, fused, last_dim, shape_error};
#[cfg(feature = "cuda")]
use crate::device::cuda::ops::cross_entropy as cuda;
use crate::error::{Error, Result};
use crate::profile::Kind;
use candle_core::{DType, Shape, Storage, Tensor};
use composed::{composed, to_i64};
pub(crate) use cpu::CheckedTargets;

/// Settings of [`cross_entropy_with`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CrossEntropyOptions {
    /// Positions with this target are left out of the sum and of the mean, and get no gradient. It need not be a class;
    /// negative values need signed targets.
    pub ignore_index: Option<i64>,
}

impl CrossEntropyOptions {
    /// The same options with another [`CrossEntropyOptions::ignore_index`].
    pub fn with_ignore_index(self, ignore_index: impl Into<Option<i64>>) -> Self {
        Self {
            ignore_index: ignore_index.into(),
        }
    }
}

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
/// [`Error::Target`] on the CPU if a target is not in `0..classes`; or if shapes, dtypes or devices do not fit.
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
    let op = match targets.device() {
        #[cfg(feature = "cuda")]
        candle_core::Device::Cuda(_) => CrossEntropy::OnDevice {
            targets: targets.contiguous()?,
            options,
            saved: None,
        },
        _ => CrossEntropy::Checked(CheckedTargets::new(targets, classes, options)?),
    };
    apply1(op, logits)
}

const OP: &str = "cross_entropy";

/// The number of classes, if logits and targets fit each other.
fn check(logits: &Tensor, targets: &Tensor) -> Result<usize> {
    check_float(OP, "logits", logits)?;
    check_device(OP, "targets", targets, logits)?;
    let classes = last_dim(OP, "logits", logits)?;
    let positions = &logits.dims()[..logits.rank() - 1];
    if targets.dims() != positions {
        return Err(shape_error(
            OP,
            "targets",
            format!("{positions:?}"),
            targets,
        ));
    }
    if targets.dtype().is_float() {
        return Err(Error::DType {
            op: OP,
            what: "targets",
            expected: "an integer dtype",
            got: targets.dtype(),
        });
    }
    Ok(classes)
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
        crate::simd::check()?;
        let checked = CheckedTargets::new(&targets, classes, options)?;
        let loss = for_dtype!(OP, logits.dtype(), T => {
            with_slices([&logits], |[x]: [&[T]; 1]| {
                tensor(vec![checked.forward(x, logits_scale)], ())
            })?
        })?;
        return Ok((loss, Kept::Checked(checked)));
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
            Self::Checked(targets) => {
                let factor = factor / targets.counted() as f64;
                for_dtype!(OP, logits.dtype(), T => {
                    with_slices([logits], |[x]: [&[T]; 1]| {
                        tensor(targets.backward(x, logits_scale, factor), logits.shape())
                    })?
                })
            }
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

/// The op as a node of the graph.
enum CrossEntropy {
    Checked(CheckedTargets),
    #[cfg(feature = "cuda")]
    OnDevice {
        /// Of any integer dtype.
        targets: Tensor,
        options: CrossEntropyOptions,
        /// Kept by the forward pass.
        saved: Option<cuda::Saved>,
    },
}

impl CrossEntropy {
    fn checked(&self) -> Result<&CheckedTargets> {
        match self {
            Self::Checked(targets) => Ok(targets),
            #[cfg(feature = "cuda")]
            Self::OnDevice { .. } => {
                crate::error::internal!("{OP}: logits and targets are on two devices")
            }
        }
    }
}

impl Fused<1> for CrossEntropy {
    fn name(&self) -> &'static str {
        OP
    }

    fn kind(&self) -> Kind {
        Kind::Loss
    }

    fn shape(&self, _: [&Tensor; 1]) -> Shape {
        Shape::from(())
    }

    fn cpu_forward(&self, [logits]: [&Tensor; 1]) -> Result<Storage> {
        let targets = self.checked()?;
        for_dtype!(OP, logits.dtype(), T => {
            with_slices([logits], |[logits]: [&[T]; 1]| storage(vec![targets.forward(logits, 1.0)]))
        })
    }

    fn cpu_backward(
        &self,
        [logits]: [&Tensor; 1],
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        if !logits.track_op() {
            return Ok([None]);
        }
        let targets = self.checked()?;
        let grad = grad.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        let factor = grad / targets.counted() as f64;
        for_dtype!(OP, logits.dtype(), T => {
            with_slices([logits], |[values]: [&[T]; 1]| {
                Ok([Some(tensor(targets.backward(values, 1.0, factor), logits.shape())?)])
            })?
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_forward(&mut self, [logits]: [&Tensor; 1]) -> Result<Storage> {
        let Self::OnDevice {
            targets,
            options,
            saved,
        } = self
        else {
            crate::error::internal!("{OP}: logits and targets are on two devices");
        };
        let targets = cuda::Targets {
            values: targets,
            ignore_index: options.ignore_index,
        };
        let (loss, kept) = cuda::forward(logits, targets)?;
        *saved = Some(kept);
        Ok(loss)
    }

    #[cfg(feature = "cuda")]
    fn cuda_backward(
        &self,
        [logits]: [&Tensor; 1],
        _res: &Tensor,
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; 1]> {
        let Self::OnDevice {
            targets,
            options,
            saved: Some(saved),
        } = self
        else {
            crate::error::internal!("{OP}: the forward pass did not run on this device");
        };
        let targets = cuda::Targets {
            values: targets,
            ignore_index: options.ignore_index,
        };
        let dx = || cuda::backward(logits, targets, saved, grad);
        Ok([logits.track_op().then(dx).transpose()?])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ops::test_support::{DTYPES, assert_same_as_composed, wave};
    use candle_core::Device;

    #[test]
    fn fused_equals_composed() -> Result<()> {
        let targets: Vec<i64> = (0..260).map(|i| (i * 29) % 67).collect();
        let targets = Tensor::from_vec(targets, (4, 65), &Device::Cpu)?;
        let logits = (wave(&[4, 65, 67], 1)? * 5.0)?;
        for dtype in DTYPES {
            for ignore_index in [None, Some(29), Some(-100)] {
                let options = CrossEntropyOptions { ignore_index };
                assert_same_as_composed(
                    dtype,
                    std::slice::from_ref(&logits),
                    |a| cross_entropy_with(&a[0], &targets, options),
                    |a| composed(&a[0], &targets, options),
                )?;
            }
        }
        Ok(())
    }
}
