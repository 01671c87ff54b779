//! Batches of a dataset as objectives take them.

use super::data::{Batch, Dataset, Task};
use super::error::{Error, Result};
use super::objective::Part;

/// Rows of tokens, and the seed of dropout in their forward pass.
#[derive(Debug, Clone)]
pub struct Rows {
    pub(super) batch: Batch,
    pub(super) dropout_seed: Option<u64>,
}

impl Rows {
    /// Tokens that are not padding.
    pub(super) fn tokens(&self) -> usize {
        self.batch.tokens.len() - self.batch.padding.iter().sum::<usize>()
    }
}

/// A dataset in batches of a number of rows, or of groups of rows.
#[derive(Debug)]
pub(super) struct Batches {
    pub(super) data: Dataset,
    rows: usize,
    validation: Vec<Batch>,
    dropout_seed: Option<u64>,
}

impl Batches {
    /// Fails unless the data are for `task`; `objective` and `expected` go into the message.
    pub(super) fn new(
        data: Dataset,
        rows: usize,
        task: Task,
        objective: &'static str,
        expected: &'static str,
    ) -> Result<Self> {
        if rows == 0 {
            return Err(Error::Setting {
                key: "rows",
                value: "0".into(),
                expected: "at least 1",
            });
        }
        if data.task() != task {
            return Err(Error::Objective {
                objective,
                expected,
            });
        }
        let validation = data.validation_batches(rows).collect();
        Ok(Self {
            data,
            rows,
            validation,
            dropout_seed: None,
        })
    }

    pub(super) fn set_dropout_seed(&mut self, seed: u64) {
        self.dropout_seed = Some(seed);
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    pub(super) fn micro_batch(&self, step: u64, part: Part) -> Rows {
        let place = (step << 16) ^ part.index as u64;
        Rows {
            batch: share(self.data.train_batch(step, self.rows), part),
            dropout_seed: (self.dropout_seed)
                .map(|seed| seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ place),
        }
    }

    pub(super) fn validation_batches(&self) -> usize {
        self.validation.len()
    }

    pub(super) fn validation_batch(&self, index: usize) -> Rows {
        Rows {
            batch: self.validation[index].clone(),
            dropout_seed: None,
        }
    }

    pub(super) fn fingerprint(&self) -> String {
        format!("{} in batches of {}", self.data.fingerprint(), self.rows)
    }
}

/// A part of the groups of a batch; the parts have nearly equal numbers.
fn share(batch: Batch, part: Part) -> Batch {
    let groups = batch.rows / batch.group.max(1);
    let at = |index: usize| groups * index / part.count.max(1) * batch.group;
    batch.part(at(part.index)..at(part.index + 1))
}
