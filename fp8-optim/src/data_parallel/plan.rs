//! Which gradients travel together, in which order.

use super::variables::Variables;
use crate::accumulator::sum_dtype;
use crate::error::{OptimError, Result};
use candle_core::{DType, Device, Tensor, Var};
use fp8_ranks::ProcessGroup;

/// What one rank's backward pass has shown about the order of gradients.
#[derive(Debug)]
pub(super) struct Learned {
    /// All variables: those that are complete during the pass, in that order, then the others.
    pub(super) order: Vec<usize>,
    /// By variable: after how many gradients it is complete; 0 if only the end of the pass shows it.
    pub(super) times: Vec<u32>,
}

/// The dtype in which gradients travel. It must not depend on which gradients a rank has: a rank without any sends zeros in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Width {
    /// That of the variable.
    Variable,
    /// That of an accumulator's sums.
    Sum,
}

impl Width {
    fn dtype(self, var: &Var) -> DType {
        match self {
            Self::Variable => var.dtype(),
            Self::Sum => sum_dtype(var),
        }
    }
}

/// The same on all ranks, but for `times`.
#[derive(Debug)]
pub(super) struct Plan {
    /// Variables of one dtype each.
    pub(super) buckets: Vec<Vec<usize>>,
    /// By variable: its bucket.
    pub(super) bucket_of: Vec<usize>,
    times: Vec<u32>,
}

impl Plan {
    /// The plan by the order of rank 0. All ranks call it.
    pub(super) fn agreed(
        learned: Learned,
        variables: &Variables,
        group: &ProcessGroup,
        bucket_bytes: usize,
    ) -> Result<Self> {
        let order: Vec<u32> = learned.order.iter().map(|&index| index as u32).collect();
        let order = match order.len() {
            0 => order,
            len => {
                let order = Tensor::from_vec(order, len, &Device::Cpu)?;
                group.broadcast(&order, 0)?.to_vec1::<u32>()?
            }
        };
        let mut buckets: Vec<Vec<usize>> = vec![];
        let (mut bytes, mut bucket_of) = (0, vec![0; order.len()]);
        for index in order.into_iter().map(|index| index as usize) {
            let var = variables.var(index);
            let fits = buckets.last().is_some_and(|bucket| {
                bytes < bucket_bytes && variables.var(bucket[0]).dtype() == var.dtype()
            });
            if !fits {
                buckets.push(vec![]);
                bytes = 0;
            }
            bytes += var.elem_count() * var.dtype().size_in_bytes();
            bucket_of[index] = buckets.len() - 1;
            if let Some(bucket) = buckets.last_mut() {
                bucket.push(index);
            }
        }
        Ok(Self {
            buckets,
            bucket_of,
            times: learned.times,
        })
    }

    /// Whether a variable is complete during the pass once it has this number of gradients.
    pub(super) fn is_complete(&self, index: usize, times: u32) -> bool {
        times > 0 && self.times[index] == times
    }

    /// The gradients of a bucket in one flat tensor, zeros where there is none.
    pub(super) fn flat(
        &self,
        bucket: usize,
        variables: &Variables,
        width: Width,
        gradient: impl Fn(usize) -> Option<Tensor>,
    ) -> Result<Tensor> {
        let mut all = vec![];
        for &index in &self.buckets[bucket] {
            let var = variables.var(index);
            let dtype = width.dtype(var);
            let Some(grad) = gradient(index).map(|grad| grad.detach()) else {
                all.push(Tensor::zeros(var.elem_count(), dtype, var.device())?);
                continue;
            };
            if grad.dims() != var.dims() {
                return Err(OptimError::Gradient {
                    name: variables.name(index).into(),
                    expected_dtype: var.dtype(),
                    expected_shape: var.shape().clone(),
                    got_dtype: grad.dtype(),
                    got_shape: grad.shape().clone(),
                });
            }
            all.push(grad.flatten_all()?.to_dtype(dtype)?);
        }
        Ok(match &all[..] {
            [one] => one.contiguous()?,
            _ => Tensor::cat(&all, 0)?,
        })
    }
}
