//! The objective of predicting the next token.

use super::data::{Dataset, IGNORED, Task};
use super::error::{Error, Result};
use super::objective::{Measured, Objective, Part};
use super::rows::{Batches, Rows};
use crate::models::{Llama, Model};
use candle_core::{Device, Tensor};

const OBJECTIVE: &str = "predict the next token";

/// Predicts each next token of a [`Dataset`]'s documents, by the targets of its batches.
#[derive(Debug)]
pub struct NextToken {
    batches: Batches,
}

impl NextToken {
    /// Steps of `rows` rows of `data`.
    ///
    /// # Errors
    /// [`Error::Setting`] if `rows` is 0; [`Error::Objective`] for data of another task.
    pub fn new(data: Dataset, rows: usize) -> Result<Self> {
        let expected = "data of `Task::LanguageModel`";
        let batches = Batches::new(data, rows, Task::LanguageModel, OBJECTIVE, expected)?;
        Ok(Self { batches })
    }

    /// Turns dropout in adapters on, with random bits from this seed, the step and the part of its batch.
    pub fn with_dropout_seed(mut self, seed: u64) -> Self {
        self.batches.set_dropout_seed(seed);
        self
    }

    /// The data.
    pub fn data(&self) -> &Dataset {
        &self.batches.data
    }
}

impl Objective<Model> for NextToken {
    type Batch = Rows;

    fn micro_batch(&self, step: u64, part: Part) -> Result<Rows> {
        Ok(self.batches.micro_batch(step, part))
    }

    fn loss(&self, model: &Model, rows: &Rows) -> Result<Tensor> {
        next_token_loss(model, rows, Llama::loss)
    }

    fn measure(&self, model: &Model, rows: &Rows) -> Result<Measured> {
        Ok(Measured::new(next_token_loss(
            model,
            rows,
            Llama::loss_value,
        )?))
    }

    fn targets(&self, rows: &Rows) -> usize {
        rows.batch.predicted()
    }

    /// A batch may send no token to an expert.
    fn may_be_idle(&self, parameter: &str) -> bool {
        parameter.contains(".experts.")
    }

    fn tokens(&self, rows: &Rows) -> usize {
        rows.batch.tokens.len()
    }

    fn validation_batches(&self) -> usize {
        self.batches.validation_batches()
    }

    fn validation_batch(&self, index: usize) -> Result<Rows> {
        Ok(self.batches.validation_batch(index))
    }

    fn fingerprint(&self) -> String {
        self.batches.fingerprint()
    }
}

/// The loss of a batch, which `loss` computes from features, positions and targets.
fn next_token_loss(
    model: &Model,
    rows: &Rows,
    loss: impl Fn(&Llama, &Tensor, &[u32], &[u32]) -> crate::models::Result<Tensor>,
) -> Result<Tensor> {
    model.set_dropout_seed(rows.dropout_seed);
    let Some(model) = model.llama() else {
        return Err(Error::Objective {
            objective: OBJECTIVE,
            expected: "a language model",
        });
    };
    let batch = &rows.batch;
    // Models are on the device of their embedding; ids go there.
    let device: &Device = crate::models::CausalLm::device(model);
    let ids = Tensor::from_slice(&batch.tokens, (batch.rows, batch.context), device)?;
    let features = model.features(&ids, &batch.segments)?;
    let targets = batch.targets.iter().enumerate();
    let (places, targets): (Vec<u32>, Vec<u32>) = targets
        .filter(|(_, target)| **target != IGNORED)
        .map(|(place, target)| (place as u32, *target))
        .unzip();
    Ok(loss(model, &features, &places, &targets)?)
}
