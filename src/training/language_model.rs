//! To predict the next token.

use super::data::{Batch, Dataset, IGNORED, Task};
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
    dropout_seed: Option<u64>,
}

/// Rows of tokens, and the seed of dropout in their forward pass.
#[derive(Debug, Clone)]
pub struct Rows {
    batch: Batch,
    dropout_seed: Option<u64>,
}

impl NextToken {
    /// Steps of so many rows of `data`.
    ///
    /// # Errors
    /// [`Error::Setting`] without a row; [`Error::Objective`] for data that is to be classified.
    pub fn new(data: Dataset, rows: usize) -> Result<Self> {
        if rows == 0 {
            return Err(Error::Setting {
                key: "rows",
                value: "0".into(),
                expected: "at least 1",
            });
        }
        if data.task() != Task::LanguageModel {
            return Err(Error::Objective {
                objective: "predict the next token",
                expected: "data of `Task::LanguageModel`",
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

    /// Turns dropout in adapters on, with random bits from this seed, the step and the part of its batch.
    pub fn with_dropout_seed(mut self, seed: u64) -> Self {
        self.dropout_seed = Some(seed);
        self
    }

    /// The data.
    pub fn data(&self) -> &Dataset {
        &self.data
    }
}

impl Objective<Model> for NextToken {
    type Batch = Rows;

    fn micro_batch(&self, step: u64, part: Part) -> Result<Rows> {
        let place = (step << 16) ^ part.index as u64;
        Ok(Rows {
            batch: rows_of(self.data.train_batch(step, self.rows), part),
            dropout_seed: (self.dropout_seed)
                .map(|seed| seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ place),
        })
    }

    fn loss(&self, model: &Model, rows: &Rows) -> Result<Tensor> {
        model.set_dropout_seed(rows.dropout_seed);
        let Some(model) = model.llama() else {
            return Err(Error::Objective {
                objective: "predict the next token",
                expected: "a language model",
            });
        };
        next_token_loss(model, &rows.batch)
    }

    fn targets(&self, rows: &Rows) -> usize {
        rows.batch.predicted()
    }

    /// Experts: a batch may send them no token.
    fn may_be_idle(&self, parameter: &str) -> bool {
        parameter.contains(".experts.")
    }

    fn tokens(&self, rows: &Rows) -> usize {
        rows.batch.tokens.len()
    }

    fn validation_batches(&self) -> usize {
        self.validation.len()
    }

    fn validation_batch(&self, index: usize) -> Result<Rows> {
        Ok(Rows {
            batch: self.validation[index].clone(),
            dropout_seed: None,
        })
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
