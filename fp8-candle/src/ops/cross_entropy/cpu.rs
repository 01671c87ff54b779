//! Cross entropy on the CPU, with checked targets.

use super::options::{CrossEntropyOptions, OP};
use crate::base::error::{Error, Result};
use crate::base::math::{Real, max, sum};
use crate::base::simd::simd;
use crate::device::cpu::elements::{Buffer, Element, block_rows, par_blocks};
use crate::device::filled;
use crate::ops::softmax::softmax_row;
use candle_core::{DType, Tensor};

/// Targets on the host.
pub(crate) struct CheckedTargets {
    /// The class of each position, `None` for ignored ones.
    targets: Vec<Option<usize>>,
    classes: usize,
    /// How many positions are not ignored.
    counted: usize,
}

impl CheckedTargets {
    pub(super) fn new(
        targets: &Tensor,
        classes: usize,
        options: CrossEntropyOptions,
    ) -> Result<Self> {
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
                _ => Err(Error::Target {
                    op: OP,
                    target,
                    position,
                    classes,
                }),
            }
        });
        let targets: Vec<_> = targets.collect::<Result<_>>()?;
        let counted = targets.iter().flatten().count();
        Ok(Self {
            targets,
            classes,
            counted,
        })
    }

    /// How many positions are not ignored.
    pub(super) fn counted(&self) -> usize {
        self.counted
    }

    /// The loss of `logits_scale * logits`.
    pub(super) fn forward<T: Element>(&self, logits: &[T], logits_scale: f64) -> T::Real {
        let logits_scale = T::Real::from_f64(logits_scale);
        // Losses per position, added in order.
        let mut losses = vec![0.0; self.targets.len()];
        par_blocks(
            &mut losses,
            block_rows(self.targets.len(), self.classes),
            |first, losses| {
                let mut buffer = Buffer::default();
                for (position, loss) in (first..).zip(losses) {
                    let Some(class) = self.targets[position] else {
                        continue;
                    };
                    let row = &logits[position * self.classes..][..self.classes];
                    *loss = nll(T::load(row, &mut buffer), logits_scale, class).to_f64();
                }
            },
        );
        T::Real::from_f64(losses.iter().sum::<f64>() / self.counted as f64)
    }

    /// `(softmax(logits_scale * logits) - one_hot) * factor`
    pub(super) fn backward<T: Element>(
        &self,
        logits: &[T],
        logits_scale: f64,
        factor: f64,
    ) -> Vec<T> {
        let classes = self.classes;
        let logits_scale = T::Real::from_f64(logits_scale);
        let factor = T::Real::from_f64(factor);
        let (dx, _) = filled(
            T::default(),
            logits.len(),
            block_rows(self.targets.len(), classes) * classes,
            |start, dx: &mut [T]| {
                let mut buffer = Buffer::default();
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
                                softmax_row(x, logits_scale, dx);
                                dx[class] -= T::Real::ONE;
                                for dx in dx.iter_mut() {
                                    *dx *= factor;
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

fn nll<R: Real>(x: &[R], scale: R, class: usize) -> R {
    simd(
        #[inline(always)]
        || {
            let largest = max(x, |x| x * scale);
            let total = sum(x, |x| (x * scale - largest).exp());
            // In this order, large logits cancel before the small logarithm is added.
            total.ln() + (largest - x[class] * scale)
        },
    )
}
