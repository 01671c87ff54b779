//! Cross entropy over integer targets.

use super::data::{
    Element, block_rows, compute_dtype, for_dtype, par_blocks, slice, tensor, with_slices,
};
use super::math::{Real, max, sum};
use super::softmax::softmax_row;
use super::{check_device, check_float, fused, last_dim, shape_error};
use crate::error::Error;
use crate::simd::simd;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Result, Shape, Tensor};
use std::sync::Arc;

/// Settings of [`cross_entropy_with`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct CrossEntropyOptions {
    /// Positions whose target is this value count neither in the sum nor in the mean, and get no gradient. It
    /// may lie outside the classes; negative values need signed targets.
    pub ignore_index: Option<i64>,
}

/// Mean negative log likelihood of integer targets under the softmax of `logits`.
///
/// ```text
/// loss = mean_i(log(sum_c exp(logits[i, c])) - logits[i, targets[i]])
/// ```
///
/// # Shapes
/// `logits` `[.., classes]` f32, bf16, f16 or f64; `targets` `[..]` of any integer dtype. The loss is a scalar,
/// f64 for f64 logits and f32 otherwise, and NaN for no position at all.
///
/// Targets are checked on the host, so on other devices than the CPU each call waits for the device.
///
/// # Errors
/// If a target is not in `0..classes`, naming it and the number of classes; if shapes, dtypes or devices do
/// not fit.
///
/// # Source
/// Bishop, "Pattern Recognition and Machine Learning", section 4.3.4, 2006.
pub fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    cross_entropy_with(logits, targets, CrossEntropyOptions::default())
}

/// [`cross_entropy`] with options. If every position is ignored, the loss is NaN and the gradient 0.
///
/// # Errors
/// As [`cross_entropy`].
pub fn cross_entropy_with(
    logits: &Tensor,
    targets: &Tensor,
    options: CrossEntropyOptions,
) -> Result<Tensor> {
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
    let op = CrossEntropy::new(targets, classes, options)?;
    if !fused(logits) {
        return op.composed(logits);
    }
    logits.contiguous()?.apply_op1(op)
}

const OP: &str = "cross_entropy";

#[derive(Debug, Clone)]
struct CrossEntropy {
    /// Class of each position, None where it is ignored.
    targets: Arc<[Option<usize>]>,
    classes: usize,
    /// How many positions are not ignored.
    counted: usize,
}

impl CrossEntropy {
    fn new(targets: &Tensor, classes: usize, options: CrossEntropyOptions) -> Result<Self> {
        if targets.dtype().is_float() {
            let (what, expected) = ("targets", "an integer dtype");
            return Err(Error::DType {
                op: OP,
                what,
                expected,
                got: targets.dtype(),
            }
            .into());
        }
        let values = targets
            .to_dtype(DType::I64)?
            .flatten_all()?
            .to_vec1::<i64>()?;
        let targets = values.iter().enumerate().map(|(position, &target)| {
            if options.ignore_index == Some(target) {
                return Ok(None);
            }
            match usize::try_from(target) {
                Ok(class) if class < classes => Ok(Some(class)),
                _ => candle_core::bail!(
                    "{OP}: target {target} at position {position} is not one of {classes} classes"
                ),
            }
        });
        let targets: Arc<[_]> = targets.collect::<Result<_>>()?;
        let counted = targets.iter().flatten().count();
        Ok(Self {
            targets,
            classes,
            counted,
        })
    }

    fn composed(&self, logits: &Tensor) -> Result<Tensor> {
        let dtype = compute_dtype(logits.dtype());
        let counted = self
            .targets
            .iter()
            .enumerate()
            .filter_map(|(i, t)| Some((i as i64, (*t)? as i64)));
        let (rows, classes): (Vec<i64>, Vec<i64>) = counted.unzip();
        if rows.is_empty() {
            return Tensor::new(f64::NAN, logits.device())?.to_dtype(dtype);
        }
        let rows = Tensor::new(rows, logits.device())?;
        let classes = Tensor::new(classes, logits.device())?.unsqueeze(1)?;
        let x = logits
            .reshape((self.targets.len(), self.classes))?
            .index_select(&rows, 0)?;
        let x = x.to_dtype(dtype)?;
        let x = x.broadcast_sub(&x.max_keepdim(D::Minus1)?.detach())?;
        let log_sum = x.exp()?.sum_keepdim(D::Minus1)?.log()?;
        (log_sum - x.gather(&classes, 1)?)?.mean_all()
    }

    fn forward<T: Element>(&self, logits: &[T]) -> T::Real {
        // Losses per position, added up in their order.
        let mut losses = vec![0.0; self.targets.len()];
        par_blocks(
            &mut losses,
            block_rows(self.targets.len(), self.classes),
            |first, losses| {
                let mut buffer = Vec::new();
                for (position, loss) in (first..).zip(losses) {
                    let Some(class) = self.targets[position] else {
                        continue;
                    };
                    let row = &logits[position * self.classes..][..self.classes];
                    *loss = nll(T::load(row, &mut buffer), class).to_f64();
                }
            },
        );
        T::Real::from_f64(losses.iter().sum::<f64>() / self.counted as f64)
    }

    /// `(softmax - one_hot) * grad / counted`
    fn backward<T: Element>(&self, logits: &[T], grad: f64) -> Vec<T> {
        let mut dx = vec![T::ZERO; logits.len()];
        let classes = self.classes;
        let grad = T::Real::from_f64(grad / self.counted as f64);
        par_blocks(
            &mut dx,
            block_rows(self.targets.len(), classes) * classes,
            |start, dx| {
                let mut buffer = Vec::new();
                for (row, dx) in dx.chunks_exact_mut(classes).enumerate() {
                    let first = start + row * classes;
                    let Some(class) = self.targets[first / classes] else {
                        continue;
                    };
                    let x = T::load(&logits[first..first + classes], &mut buffer);
                    T::store(dx, |dx| {
                        simd(
                            #[inline(always)]
                            || {
                                softmax_row(x, T::Real::ONE, dx);
                                dx[class] = dx[class] - T::Real::ONE;
                                for dx in dx.iter_mut() {
                                    *dx = *dx * grad;
                                }
                            },
                        );
                    });
                }
            },
        );
        dx
    }
}

fn nll<R: Real>(x: &[R], class: usize) -> R {
    simd(
        #[inline(always)]
        || {
            let largest = max(x, |x| x);
            let total = sum(x, |x| (x - largest).exp());
            // In this order large logits cancel before a small logarithm is added.
            total.ln() + (largest - x[class])
        },
    )
}

impl CustomOp1 for CrossEntropy {
    fn name(&self) -> &'static str {
        OP
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        for_dtype!(OP, storage.dtype(), T => {
            let loss = self.forward::<T>(slice(storage, layout)?);
            Ok((candle_core::WithDType::to_cpu_storage_owned(vec![loss]), Shape::from(())))
        })
    }

    fn bwd(&self, logits: &Tensor, _res: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        if !logits.track_op() {
            return Ok(None);
        }
        let grad = grad.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        for_dtype!(OP, logits.dtype(), T => {
            with_slices([logits], |[values]: [&[T]; 1]| {
                Some(tensor(self.backward(values, grad), logits.shape()))
            })
        })
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
                let op = CrossEntropy::new(&targets, 67, options)?;
                assert_same_as_composed(
                    dtype,
                    std::slice::from_ref(&logits),
                    |a| cross_entropy_with(&a[0], &targets, options),
                    |a| op.composed(&a[0]),
                )?;
            }
        }
        Ok(())
    }
}
