//! The objective of classifying texts.

use super::data::{Dataset, Task};
use super::encoder::{encoder, hits, inputs};
use super::error::{Error, Result};
use super::objective::{Measured, Objective, Part};
use super::rows::{Batches, Rows};
use crate::models::{Bert, Model};
use crate::nn::loss;
use candle_core::Tensor;

const OBJECTIVE: &str = "classify texts";

/// Predicts the labels of a [`Dataset`]'s texts by the classifier of an encoder: the mean cross entropy of its logits.
#[derive(Debug)]
pub struct Classify {
    batches: Batches,
}

impl Classify {
    /// Steps of `rows` texts of `data`.
    ///
    /// # Errors
    /// [`Error::Setting`] if `rows` is 0; [`Error::Objective`] for data of another task.
    pub fn new(data: Dataset, rows: usize) -> Result<Self> {
        let expected = "data of `Task::Classification`";
        let batches = Batches::new(data, rows, Task::Classification, OBJECTIVE, expected)?;
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

    /// The loss of a batch, and its logits.
    fn logits(&self, model: &Model, rows: &Rows) -> Result<(Tensor, Tensor)> {
        let model: &Bert = encoder(model, rows, OBJECTIVE)?;
        let labels = self.batches.data.labels();
        if model.labels() != labels {
            return Err(Error::Labels {
                model: model.labels().join(", "),
                data: labels.join(", "),
            });
        }
        let (ids, mask) = inputs(&rows.batch, model.device())?;
        let logits = model.classify(&ids, &mask)?;
        let classes = rows.batch.labels.as_deref().unwrap_or_default();
        let classes = Tensor::from_slice(classes, classes.len(), model.device())?;
        Ok((loss::cross_entropy(&logits, &classes)?, logits))
    }
}

impl Objective<Model> for Classify {
    type Batch = Rows;

    fn micro_batch(&self, step: u64, part: Part) -> Result<Rows> {
        Ok(self.batches.micro_batch(step, part))
    }

    fn loss(&self, model: &Model, rows: &Rows) -> Result<Tensor> {
        Ok(self.logits(model, rows)?.0)
    }

    /// The accuracy is the share of texts whose label has the largest logit.
    fn measure(&self, model: &Model, rows: &Rows) -> Result<Measured> {
        let (loss, logits) = self.logits(model, rows)?;
        let classes = rows.batch.labels.as_deref().unwrap_or_default();
        Ok(Measured::new(loss).with_hits(hits(&logits, classes)?))
    }

    fn targets(&self, rows: &Rows) -> usize {
        rows.batch.rows
    }

    fn tokens(&self, rows: &Rows) -> usize {
        rows.tokens()
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
