//! The layers of a classifier.

use crate::models::error::Result;
use crate::models::layers::Projection;
use crate::nn::{VarBuilder, linear};
use candle_core::{Module, Tensor};
use fp8_recipes::Fp8Module;

/// The layer that makes the features of a text from those of its first token.
pub(super) const POOLER: &str = "pooler.dense";
/// The layer that makes the logits of classes from the features of a text.
pub(super) const CLASSIFIER: &str = "classifier";

/// As transformers' `BertForSequenceClassification` has it: a pooler, and a linear layer for the classes.
#[derive(Debug, Fp8Module)]
pub(super) struct Head {
    pub(super) pooler: Projection,
    pub(super) classifier: Projection,
}

impl Head {
    /// Reads the tensors of the whole file, `all`, and those of the encoder, `encoder`.
    pub(super) fn new(
        hidden: usize,
        classes: usize,
        all: &VarBuilder<'_>,
        encoder: &VarBuilder<'_>,
    ) -> Result<Self> {
        Ok(Self {
            pooler: linear(hidden, hidden, encoder.pp(POOLER))?.into(),
            classifier: linear(hidden, classes, all.pp(CLASSIFIER))?.into(),
        })
    }

    /// Logits `[batch, classes]` of the features `[batch, tokens, hidden_size]`.
    pub(super) fn forward(&self, features: &Tensor) -> Result<Tensor> {
        let first = features.narrow(1, 0, 1)?.squeeze(1)?.contiguous()?;
        let pooled = self.pooler.forward(&first)?.tanh()?;
        Ok(self.classifier.forward(&pooled)?)
    }

    pub(super) fn projections(&mut self) -> [&mut Projection; 2] {
        [&mut self.pooler, &mut self.classifier]
    }
}
