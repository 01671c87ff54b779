//! The objective of embedding queries near the texts that belong to them.

use super::data::{Dataset, Task};
use super::encoder::{encoder, hits, inputs};
use super::error::{Error, Result};
use super::objective::{Measured, Objective, Part};
use super::rows::{Batches, Rows};
use crate::models::{Bert, Model, Pooling};
use crate::nn::loss;
use candle_core::Tensor;

const OBJECTIVE: &str = "embed texts";

/// Finds the text that belongs to a query among all texts of its batch, by the cosines of their embeddings. The loss is the mean cross
/// entropy of cosine / temperature over the positive and negative texts of the batch; a query's target is its own positive text.
///
/// With micro-batches, each part is a batch of its own, so a query is compared with fewer texts of other queries.
#[derive(Debug)]
pub struct Contrast {
    batches: Batches,
    temperature: f64,
    pooling: Pooling,
}

impl Contrast {
    /// Steps of so many queries of `data`, each with its text or texts; a temperature of 0.05, the mean over tokens.
    ///
    /// # Errors
    /// [`Error::Setting`] for a single query without a negative text, which would have no other text to compare with; [`Error::Objective`]
    /// for data of another task.
    pub fn new(data: Dataset, rows: usize) -> Result<Self> {
        let expected = "data of `Task::Embedding`";
        let batches = Batches::new(data, rows, Task::Embedding, OBJECTIVE, expected)?;
        let group = batches.data.train_batch(0, 1).group;
        if batches.rows() == 1 && group < 3 {
            return Err(Error::Setting {
                key: "rows",
                value: "1".into(),
                expected: "at least 2, or texts with a `negative`",
            });
        }
        Ok(Self {
            batches,
            temperature: 0.05,
            pooling: Pooling::Mean,
        })
    }

    /// Sets the temperature, by which cosines are divided.
    ///
    /// # Errors
    /// [`Error::Setting`] unless it is positive and finite.
    pub fn with_temperature(mut self, temperature: f64) -> Result<Self> {
        if !(temperature.is_finite() && temperature > 0.) {
            return Err(Error::Setting {
                key: "temperature",
                value: temperature.to_string(),
                expected: "a positive number",
            });
        }
        self.temperature = temperature;
        Ok(self)
    }

    /// Sets how features become an embedding.
    pub fn with_pooling(mut self, pooling: Pooling) -> Self {
        self.pooling = pooling;
        self
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

    /// The loss of a batch, and its scores, `[queries, texts]`.
    fn scores(&self, model: &Model, rows: &Rows) -> Result<(Tensor, Tensor)> {
        let model: &Bert = encoder(model, rows, OBJECTIVE)?;
        let (ids, mask) = inputs(&rows.batch, model.device())?;
        let group = rows.batch.group;
        let queries = rows.batch.rows / group;
        // One pass: the texts of a batch are padded to the longest of all.
        let all = model.embed_with(&ids, &mask, self.pooling)?;
        let all = all.reshape((queries, group, ()))?;
        let of = |place: usize| all.narrow(1, place, 1)?.squeeze(1)?.contiguous();
        // All positive texts first, so that the target of a query is its number.
        let texts: Vec<Tensor> = (1..group).map(of).collect::<candle_core::Result<_>>()?;
        let texts = Tensor::cat(&texts, 0)?;
        let scores = (of(0)?.matmul(&texts.t()?)? * (1. / self.temperature))?;
        let targets = Tensor::arange(0, queries as u32, model.device())?;
        Ok((loss::cross_entropy(&scores, &targets)?, scores))
    }
}

impl Objective<Model> for Contrast {
    type Batch = Rows;

    fn micro_batch(&self, step: u64, part: Part) -> Result<Rows> {
        let rows = self.batches.micro_batch(step, part);
        match is_choice(&rows) {
            true => Ok(rows),
            false => Err(Error::Setting {
                key: "micro_batches",
                value: part.count.to_string(),
                expected: "parts of at least 2 queries, or texts with a `negative`",
            }),
        }
    }

    fn loss(&self, model: &Model, rows: &Rows) -> Result<Tensor> {
        Ok(self.scores(model, rows)?.0)
    }

    /// The accuracy is the share of queries whose own text is the nearest of its batch.
    fn measure(&self, model: &Model, rows: &Rows) -> Result<Measured> {
        let (loss, scores) = self.scores(model, rows)?;
        let targets: Vec<u32> = (0..scores.dim(0)? as u32).collect();
        Ok(Measured::new(loss).with_hits(hits(&scores, &targets)?))
    }

    fn targets(&self, rows: &Rows) -> usize {
        rows.batch.rows / rows.batch.group
    }

    fn tokens(&self, rows: &Rows) -> usize {
        rows.tokens()
    }

    /// Leaves out a last batch of a single query, which would have no other text to compare with.
    fn validation_batches(&self) -> usize {
        let count = self.batches.validation_batches();
        match count.checked_sub(1) {
            Some(last) if !is_choice(&self.batches.validation_batch(last)) => last,
            _ => count,
        }
    }

    fn validation_batch(&self, index: usize) -> Result<Rows> {
        Ok(self.batches.validation_batch(index))
    }

    fn fingerprint(&self) -> String {
        let (batches, temperature) = (self.batches.fingerprint(), self.temperature);
        format!("{batches}, temperature {temperature}, {:?}", self.pooling)
    }
}

/// Whether a query has another text to compare its own with.
fn is_choice(rows: &Rows) -> bool {
    let group = rows.batch.group;
    rows.batch.rows / group * (group - 1) >= 2
}
