//! The ranks of a job: how they divide a batch, and which of them writes.

use crate::data::Batch;
use anyhow::{Result, ensure};
use candle_core::Tensor;
use clap::ValueEnum;
use fp8::optim::GradientTravel;
use fp8::ranks::{ProcessGroup, ReduceOp, World, WorldOptions};
use serde::Serialize;
use std::collections::BTreeMap;

/// What ranks divide.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Parallel {
    /// The batch: every rank has the whole model
    Data,
}

/// This rank of the job.
pub struct Ranks {
    world: World,
    pub group: ProcessGroup,
    pub parallel: Option<Parallel>,
    pub travel: Travel,
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

/// What a rank sends in a step, by operation.
#[derive(Debug, Serialize)]
pub struct Sent {
    calls_per_step: f64,
    bytes_per_step: f64,
}

impl Ranks {
    /// Joins the job of the launcher, if there is one.
    pub fn join(parallel: Option<Parallel>, travel: Travel) -> Result<Self> {
        let world = World::join(WorldOptions::default())?;
        let group = world.group().clone();
        ensure!(
            group.size() == 1 || parallel.is_some(),
            "{} ranks would all train the same: say what they divide with --parallel",
            group.size()
        );
        Ok(Self {
            world,
            group,
            parallel,
            travel,
        })
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

    /// What this rank has sent in `steps`, by operation.
    pub fn sent(&self, steps: u64) -> BTreeMap<String, Sent> {
        let per_step = |count: u64| count as f64 / steps.max(1) as f64;
        let kinds = self.group.traffic();
        let kinds = kinds.iter().map(|(operation, sent)| {
            let sent = Sent {
                calls_per_step: per_step(sent.calls),
                bytes_per_step: per_step(sent.bytes),
            };
            (operation.to_string(), sent)
        });
        kinds.collect()
    }

    /// Ends the job, once all ranks have come here.
    pub fn finish(self) -> Result<()> {
        Ok(self.world.finish()?)
    }
}
