//! What a trainer learns.

use super::error::Result;
use candle_core::Tensor;

/// A part of a step's batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Part {
    /// Its number, from 0.
    pub index: usize,
    /// The number of parts.
    pub count: usize,
}

impl Part {
    /// Part `number` of `count`, counted from 0.
    pub fn new(index: usize, count: usize) -> Self {
        Self { index, count }
    }

    /// The whole batch.
    pub fn whole() -> Self {
        Self::new(0, 1)
    }
}

/// What a validation measures of a batch.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Measured {
    /// The mean loss over its targets, a scalar.
    pub loss: Tensor,
    /// How many targets were predicted correctly; None if that is not counted.
    pub hits: Option<usize>,
}

impl Measured {
    /// A loss without a count.
    pub fn new(loss: Tensor) -> Self {
        Self { loss, hits: None }
    }

    /// Adds the number of targets that were predicted correctly.
    pub fn with_hits(mut self, hits: usize) -> Self {
        self.hits = Some(hits);
        self
    }
}

/// What is learned: batches, and their loss under a model `M`.
///
/// Batches depend on the step alone, so that a resumed run sees the same ones.
pub trait Objective<M> {
    /// A micro-batch, with all that the loss needs.
    type Batch;

    /// A part of the batch of a step, counted from 0.
    ///
    /// # Errors
    /// If it cannot be made.
    fn micro_batch(&self, step: u64, part: Part) -> Result<Self::Batch>;

    /// The mean loss over the targets of a batch: a scalar with a gradient.
    ///
    /// # Errors
    /// If the model fails.
    fn loss(&self, model: &M, batch: &Self::Batch) -> Result<Tensor>;

    /// What a validation measures; [`Objective::loss`] alone by default.
    ///
    /// # Errors
    /// If the model fails.
    fn measure(&self, model: &M, batch: &Self::Batch) -> Result<Measured> {
        Ok(Measured::new(self.loss(model, batch)?))
    }

    /// How many targets the loss is the mean of, which is the weight of a micro-batch in its step. Batches without targets are left out.
    fn targets(&self, batch: &Self::Batch) -> usize;

    /// Whether a batch may leave this parameter without a gradient, such as that of an expert that gets no token. No by default: a parameter
    /// without a gradient in the first step is then an error.
    fn may_be_idle(&self, parameter: &str) -> bool {
        let _ = parameter;
        false
    }

    /// How many tokens, or other inputs, the batch has, to compute the speed.
    fn tokens(&self, batch: &Self::Batch) -> usize;

    /// The number of batches of a validation; 0, the default, without held-out data.
    fn validation_batches(&self) -> usize {
        0
    }

    /// A batch of the validation.
    ///
    /// # Errors
    /// If it cannot be made.
    fn validation_batch(&self, index: usize) -> Result<Self::Batch> {
        self.micro_batch(index as u64, Part::whole())
    }

    /// Identifies the data: a run resumes only with the data that it began with.
    fn fingerprint(&self) -> String;
}

/// An objective that is chosen at run time.
impl<M, T: Objective<M> + ?Sized> Objective<M> for Box<T> {
    type Batch = T::Batch;

    fn micro_batch(&self, step: u64, part: Part) -> Result<Self::Batch> {
        (**self).micro_batch(step, part)
    }

    fn loss(&self, model: &M, batch: &Self::Batch) -> Result<Tensor> {
        (**self).loss(model, batch)
    }

    fn measure(&self, model: &M, batch: &Self::Batch) -> Result<Measured> {
        (**self).measure(model, batch)
    }

    fn targets(&self, batch: &Self::Batch) -> usize {
        (**self).targets(batch)
    }

    fn may_be_idle(&self, parameter: &str) -> bool {
        (**self).may_be_idle(parameter)
    }

    fn tokens(&self, batch: &Self::Batch) -> usize {
        (**self).tokens(batch)
    }

    fn validation_batches(&self) -> usize {
        (**self).validation_batches()
    }

    fn validation_batch(&self, index: usize) -> Result<Self::Batch> {
        (**self).validation_batch(index)
    }

    fn fingerprint(&self) -> String {
        (**self).fingerprint()
    }
}
