//! To predict the next token.

use super::data::{Batch, Dataset, IGNORED};
use super::error::{Error, Result};
use super::objective::{Objective, Part};
use crate::models::{Llama, Model};
use candle_core::{Device, Tensor};

/// Predicts each next token of a [`Dataset`]'s documents, by the targets of its batches.
#[derive(Debug)]
pub struct NextToken {
    data: Dataset,
    rows: usize,
    validation: Vec<Batch>,
}

impl NextToken {
    /// Steps of so many rows of `data`.
    ///
    /// # Errors
    /// [`Error::Setting`] without a row.
    pub fn new(data: Dataset, rows: usize) -> Result<Self> {
        if rows == 0 {
            return Err(Error::Setting {
                key: "rows",
                value: "0".into(),
                expected: "at least 1",
            });
        }
        let validation = data.validation_batches(rows).collect();
        Ok(Self {
            data,
            rows,
            validation,
        })
    }

    /// The data.
    pub fn data(&self) -> &Dataset {
        &self.data
    }
}

impl Objective<Model> for NextToken {
    type Batch = Batch;

    fn micro_batch(&self, step: u64, part: Part) -> Result<Batch> {
        Ok(rows_of(self.data.train_batch(step, self.rows), part))
    }

    fn loss(&self, model: &Model, batch: &Batch) -> Result<Tensor> {
        let Some(model) = model.llama() else {
            return Err(Error::Objective {
                objective: "predict the next token",
                expected: "a language model",
            });
        };
        next_token_loss(model, batch)
    }

    fn targets(&self, batch: &Batch) -> usize {
        batch.predicted()
    }

    fn tokens(&self, batch: &Batch) -> usize {
        batch.tokens.len()
    }

    fn validation_batches(&self) -> usize {
        self.validation.len()
    }

    fn validation_batch(&self, index: usize) -> Result<Batch> {
        Ok(self.validation[index].clone())
    }

    fn fingerprint(&self) -> String {
        format!("{} in batches of {}", self.data.fingerprint(), self.rows)
    }
}

fn next_token_loss(model: &Llama, batch: &Batch) -> Result<Tensor> {
    // Models are on the device of their embedding; ids go there.
    let device: &Device = crate::models::CausalLm::device(model);
    let ids = Tensor::from_slice(&batch.tokens, (batch.rows, batch.context), device)?;
    let features = model.features(&ids, &batch.segments)?;
    let targets = batch.targets.iter().enumerate();
    let (places, targets): (Vec<u32>, Vec<u32>) = targets
        .filter(|(_, target)| **target != IGNORED)
        .map(|(place, target)| (place as u32, *target))
        .unzip();
    Ok(model.loss(&features, &places, &targets)?)
}

/// A part of the rows of a batch; the parts have nearly equal numbers.
fn rows_of(batch: Batch, part: Part) -> Batch {
    let at = |index: usize| batch.rows * index / part.count.max(1);
    batch.part(at(part.index)..at(part.index + 1))
}
