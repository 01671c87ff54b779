//! What the ranks exchange before a step of parameters that they hold in parts.

use super::error::{OptimError, Result};
use super::norm::{BLOCK, sum_of_partials};
use super::veto::CastVeto;
use candle_core::{Device, Tensor};
use fp8_ranks::{ReduceOp, ShardedVarMap};

/// One exchange a step: partial sums of the norm, which every rank adds in the order of one process; whether a cast has seen Inf or NaN;
/// and what the ranks have gathered, which must be the same.
#[derive(Debug)]
pub(super) struct Exchange {
    map: ShardedVarMap,
    /// Partial sums of each rank.
    partials: Vec<usize>,
    /// Runs of partial sums in the order of variables and blocks: the rank, and how many sums.
    order: Vec<(usize, usize)>,
}

/// What a rank sends after its partial sums: the mark of its casts, and two halves of its trace.
const EXTRAS: usize = 3;

impl Exchange {
    /// For the parameters that are in `map` now.
    pub(super) fn new(map: &ShardedVarMap) -> Self {
        let mut partials = vec![0; map.group().size()];
        let mut order = vec![];
        for var in map.vars() {
            for (rank, count) in var.layout().counts().iter().enumerate() {
                let blocks = count.div_ceil(BLOCK);
                if blocks > 0 {
                    partials[rank] += blocks;
                    order.push((rank, blocks));
                }
            }
        }
        Self {
            map: map.clone(),
            partials,
            order,
        }
    }

    /// The parameters have changed, on all ranks.
    pub(super) fn changed(&self) {
        self.map.forget_amaxes();
    }

    /// The largest of the ranks' numbers.
    ///
    /// # Errors
    /// Those of the group.
    pub(super) fn most(&self, own: usize) -> Result<usize> {
        let own = Tensor::new(&[own as u32], &Device::Cpu)?;
        let most = self.map.group().all_reduce(&own, ReduceOp::Max)?;
        Ok(most.to_vec1::<u32>()?[0] as usize)
    }

    /// The sum of squares over the gradients of all ranks, from this rank's partial sums. NaN on all ranks if a cast on any has seen Inf or
    /// NaN.
    ///
    /// # Errors
    /// [`OptimError::RanksDiverged`] on all ranks, and errors of the group.
    pub(super) fn sum_of_squares(&self, own: &[f64], veto: &CastVeto) -> Result<f64> {
        let trace = self.map.trace();
        let mut values = own.to_vec();
        let mut mark = 0.;
        for one in veto.marks()? {
            mark += one.to_device(&Device::Cpu)?.to_scalar::<f64>()?;
        }
        // Halves of 32 bits are exact in f64.
        values.extend([
            mark,
            f64::from((trace >> 32) as u32),
            f64::from(trace as u32),
        ]);
        let count = values.len();
        let values = Tensor::from_vec(values, count, &Device::Cpu)?;
        let counts: Vec<usize> = self.partials.iter().map(|own| own + EXTRAS).collect();
        let group = self.map.group();
        let all = group.all_gather(&values, &counts)?.to_vec1::<f64>()?;
        let mut rest = &all[..];
        let mut ranks = vec![];
        for count in &self.partials {
            let (own, others) = rest.split_at(count + EXTRAS);
            ranks.push(own.split_at(*count));
            rest = others;
        }
        let other = (ranks.iter()).position(|(_, extras)| extras[1..] != ranks[0].1[1..]);
        if let Some(other) = other {
            let rank = group.rank();
            return Err(OptimError::RanksDiverged { rank, other });
        }
        let mut ordered = vec![];
        let mut taken = vec![0; ranks.len()];
        for &(rank, blocks) in &self.order {
            let begin = taken[rank];
            taken[rank] += blocks;
            ordered.extend_from_slice(&ranks[rank].0[begin..begin + blocks]);
        }
        // The place where one process adds its marks.
        ordered.extend(ranks.iter().map(|(_, extras)| extras[0]));
        Ok(sum_of_partials(&ordered))
    }
}
