//! The sums that come back from the other ranks.

use super::plan::Plan;
use super::travel::Sum;
use super::variables::Variables;
use crate::accumulator::sum_dtype;
use crate::error::Result;
use crate::veto::poison_smallest;
use candle_core::backprop::GradStore;
use candle_core::{Device, Tensor};
use fp8_ranks::{ProcessGroup, ReduceOp};

pub(super) struct Arrival<'a> {
    plan: &'a Plan,
    variables: &'a Variables,
    /// By bucket.
    sums: Vec<Tensor>,
    /// By variable: whether any rank has a gradient.
    present: Vec<bool>,
    /// Whether a cast of any rank has seen Inf or NaN.
    veto: bool,
}

impl<'a> Arrival<'a> {
    /// Waits for the sums. `grads` has this rank's gradients, and `veto` says whether its casts have seen Inf or NaN.
    pub(super) fn of(
        sent: Vec<Sum>,
        plan: &'a Plan,
        variables: &'a Variables,
        group: &ProcessGroup,
        grads: &GradStore,
        veto: bool,
    ) -> Result<Self> {
        let own = (0..variables.len()).map(|index| grads.get(variables.var(index)).is_some());
        let own: Vec<u32> = own.chain([veto]).map(u32::from).collect();
        let map = Tensor::new(own, &Device::Cpu)?;
        let map = group.start_all_reduce(&map, ReduceOp::Max)?;
        let sent = sent.into_iter().map(Sum::advance);
        let sent = sent.collect::<Result<Vec<_>>>()?;
        let map = map.advance()?;
        let sums = sent.into_iter().map(Sum::wait).collect::<Result<_, _>>()?;
        let mut present: Vec<bool> = map
            .wait()?
            .to_vec1::<u32>()?
            .into_iter()
            .map(|some| some != 0)
            .collect();
        let veto = present.pop().unwrap_or(false);
        Ok(Self {
            plan,
            variables,
            sums,
            present,
            veto,
        })
    }

    /// Puts `factor` times the sums in the place of this rank's gradients.
    pub(super) fn replace(self, grads: &mut GradStore, factor: f64) -> Result<()> {
        let mut all = vec![];
        for (bucket, sum) in self.plan.buckets.iter().zip(&self.sums) {
            let mut begin = 0;
            for &index in bucket {
                let var = self.variables.var(index);
                let own = sum.narrow(0, begin, var.elem_count())?;
                begin += var.elem_count();
                if self.present[index] {
                    // As an accumulator does it: the product in the dtype of sums, rounded once.
                    let mut own = own.reshape(var.shape())?;
                    if factor != 1. {
                        own = (own.to_dtype(sum_dtype(var))? * factor)?;
                    }
                    all.push((index, own.to_dtype(var.dtype())?));
                }
            }
        }
        if self.veto {
            let mark = Tensor::new(f64::NAN, &Device::Cpu)?;
            poison_smallest(all.iter_mut().map(|(_, grad)| grad), &[mark])?;
        }
        for index in 0..self.variables.len() {
            grads.remove(self.variables.var(index));
        }
        for (index, grad) in all {
            grads.insert(self.variables.var(index), grad);
        }
        Ok(())
    }
}
