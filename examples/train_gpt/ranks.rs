//! The ranks of a job: how they divide a batch, and which of them writes.

use crate::data::Batch;
use anyhow::{Result, ensure};
use candle_core::Tensor;
use clap::ValueEnum;
use fp8::optim::GradientTravel;
use fp8::ranks::{ProcessGroup, ReduceOp};

/// What ranks divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Parallel {
    /// The batch: every rank has the whole model
    Data,
    /// The batch and the parameters: layers gather theirs when they compute
    Sharded,
    /// The same, with the weights of FP8 layers gathered as FP8 codes
    ShardedFp8,
}

/// This rank of the job.
#[derive(Clone)]
pub struct Ranks {
    pub group: ProcessGroup,
    pub parallel: Option<Parallel>,
    pub travel: Travel,
}

impl Parallel {
    /// As the flag spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::Sharded => "sharded",
            Self::ShardedFp8 => "sharded-fp8",
        }
    }
}

/// In which form gradients travel between ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Travel {
    /// In f32
    #[default]
    F32,
    /// As FP8 codes, added in f32
    Fp8,
}

impl From<Travel> for GradientTravel {
    fn from(travel: Travel) -> Self {
        match travel {
            Travel::F32 => Self::Unchanged,
            Travel::Fp8 => Self::Fp8,
        }
    }
}

impl Ranks {
    /// A rank of a job; ranks that divide nothing are an error.
    pub fn new(group: &ProcessGroup, parallel: Option<Parallel>, travel: Travel) -> Result<Self> {
        ensure!(
            group.size() == 1 || parallel.is_some(),
            "all {} ranks would train the same: --parallel says what they divide",
            group.size()
        );
        Ok(Self {
            group: group.clone(),
            parallel,
            travel,
        })
    }

    /// Whether ranks hold parameters in parts.
    pub fn is_sharded(&self) -> bool {
        matches!(
            self.parallel,
            Some(Parallel::Sharded | Parallel::ShardedFp8)
        )
    }

    /// Whether this rank prints and writes.
    pub fn leads(&self) -> bool {
        self.group.rank() == 0
    }

    /// Whether ranks have to agree on each step.
    pub fn is_parallel(&self) -> bool {
        self.parallel.is_some()
    }

    /// How many micro-batches each rank has of `micro_batches` in a step.
    pub fn share(&self, micro_batches: usize, batch: usize) -> Result<usize> {
        let ranks = self.group.size();
        ensure!(
            micro_batches > 0 && batch.is_multiple_of(micro_batches),
            "a batch of {batch} sequences cannot be divided into {micro_batches} micro-batches of one size"
        );
        ensure!(
            micro_batches.is_multiple_of(ranks),
            "{micro_batches} micro-batches cannot be divided over {ranks} ranks"
        );
        Ok(micro_batches / ranks)
    }

    /// The micro-batches of this rank with their places in the step.
    pub fn own(
        &self,
        (inputs, targets): &Batch,
        micro_batches: usize,
    ) -> Result<Vec<(u32, Batch)>> {
        let share = micro_batches / self.group.size();
        let rows = inputs.dim(0)? / micro_batches;
        let first = self.group.rank() * share;
        (first..first + share)
            .map(|i| {
                let part = |x: &Tensor| x.narrow(0, i * rows, rows)?.contiguous();
                Ok((i as u32, (part(inputs)?, part(targets)?)))
            })
            .collect()
    }

    /// The sum over the ranks.
    pub fn sum(&self, values: &Tensor) -> Result<Tensor> {
        match self.is_parallel() {
            true => Ok(self.group.all_reduce(values, ReduceOp::Sum)?),
            false => Ok(values.clone()),
        }
    }

    /// What `choose` gives on the first rank, on all ranks.
    pub fn chosen(&self, choose: impl FnOnce() -> Result<Vec<String>>) -> Result<Vec<String>> {
        let own = match self.leads() {
            true => Some(serde_json::to_vec(&choose()?)?),
            false => None,
        };
        let bytes = self.group.broadcast_bytes(own.as_deref(), 0)?;
        Ok(serde_json::from_slice(&bytes)?)
    }

    /// How often each operation was called in a step, and how many bytes this rank has sent with it.
    pub fn sent(&self, steps: u64) -> Vec<(String, [f64; 2])> {
        let per_step = |count: u64| count as f64 / steps.max(1) as f64;
        let kinds = self.group.traffic();
        let kinds = kinds.iter().map(|(operation, sent)| {
            (
                operation.to_string(),
                [sent.calls, sent.bytes].map(per_step),
            )
        });
        kinds.collect()
    }
}
