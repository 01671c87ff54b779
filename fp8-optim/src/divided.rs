//! What ranks that hold some variables in parts and the others whole tell each other before a step.

use super::error::Result;
use super::norm::SumOfSquares;
use super::veto::CastVeto;
use candle_core::{Device, Tensor};
use fp8_ranks::{ProcessGroup, ReduceOp};

/// The ranks that hold the other parts, and for each variable whether this rank holds only a part.
#[derive(Debug)]
pub(super) struct Divided {
    group: ProcessGroup,
    is_part: Vec<bool>,
}

impl Divided {
    pub(super) fn new(group: ProcessGroup, is_part: Vec<bool>) -> Self {
        Self { group, is_part }
    }

    /// The largest of the ranks' numbers.
    ///
    /// # Errors
    /// Those of the group.
    pub(super) fn most(&self, own: usize) -> Result<usize> {
        let own = u32::try_from(own).unwrap_or(u32::MAX);
        let own = Tensor::new(&[own], &Device::Cpu)?;
        let all = self.group.all_reduce(&own, ReduceOp::Max)?;
        let most = all.to_vec1::<u32>()?.into_iter().max();
        Ok(most.unwrap_or_default() as usize)
    }

    /// The sum of squares over the whole gradients, the same on all ranks: not finite if a gradient of any rank is not, or a cast of any has
    /// seen Inf or NaN. `grads` are this rank's, and `lens` the elements of its variables, in the order of the variables.
    ///
    /// # Errors
    /// Those of the group, and of the device.
    pub(super) fn sum_of_squares(
        &self,
        lens: impl Iterator<Item = usize>,
        grads: &[Option<Tensor>],
        veto: &CastVeto,
    ) -> Result<f64> {
        let (mut parts, mut whole) = (SumOfSquares::default(), SumOfSquares::default());
        for ((len, grad), is_part) in lens.zip(grads).zip(&self.is_part) {
            let sum = if *is_part { &mut parts } else { &mut whole };
            sum.add(len, grad.as_ref())?;
        }
        parts.add_marks(veto.marks()?)?;
        // Rank 0 counts whole variables. 0 times Inf or NaN is NaN, which no rank hides.
        let share = if self.group.rank() == 0 { 1. } else { 0. };
        let own = parts.total()? + whole.total()? * share;
        let own = Tensor::new(&[own], &Device::Cpu)?;
        // All ranks add the same numbers in the same order, whatever order the group's sums have.
        let all = self.group.all_gather(&own, &vec![1; self.group.size()])?;
        Ok(all.to_vec1::<f64>()?.iter().sum())
    }
}
