//! The output head: a separate layer, or the embedding.

use super::LlamaConfig;
use crate::models::error::Result;
use crate::models::layers::{Projection, file_has};
use crate::nn::{VarBuilder, linear_no_bias};
use candle_core::{DType, Module, Tensor};
use fp8_candle::ops::{self, LinearOptions};
use fp8_recipes::Fp8Module;

#[derive(Debug, Clone, Fp8Module)]
pub(super) enum Head {
    /// `lm_head.weight`, in FP8 if the file stores it in FP8.
    Own(Projection),
    /// The embedding's table, `[vocab_size, hidden_size]`, in the dtype of the embedding.
    Tied(#[fp8(skip)] Tensor),
}

impl Head {
    pub(super) fn new(config: &LlamaConfig, table: &Tensor, vb: &VarBuilder<'_>) -> Result<Self> {
        let own = vb.pp("lm_head");
        // A VarMap creates any tensor that it is asked for; only a file can hold a head despite the tie.
        if config.tie_word_embeddings && !file_has(&own, "weight") {
            return Ok(Self::Tied(table.clone()));
        }
        let (inputs, outputs) = (config.hidden_size, config.vocab_size);
        Ok(Self::Own(linear_no_bias(inputs, outputs, own)?.into()))
    }

    /// The layer; None if the head is the embedding.
    pub(super) fn projection(&mut self) -> Option<&mut Projection> {
        match self {
            Self::Own(layer) => Some(layer),
            Self::Tied(_) => None,
        }
    }

    /// Detaches a tied head, so that it gets no gradient.
    pub(super) fn freeze(&mut self) {
        if let Self::Tied(table) = self {
            *table = table.detach();
        }
    }

    /// The matrix, `[vocab_size, hidden_size]`, if the head multiplies by one in high precision and does nothing else.
    pub(super) fn matrix(&self) -> Option<&Tensor> {
        match self {
            Self::Own(layer) => layer.matrix(),
            Self::Tied(table) => Some(table),
        }
    }

    /// x: `[.., hidden_size]` to `[.., vocab_size]`, in x's dtype. Operands are rounded to a dtype unless FP8 replaces it.
    pub(super) fn forward(&self, x: &Tensor, operands: Option<DType>) -> Result<Tensor> {
        match (self, operands.and(self.matrix())) {
            (_, Some(matrix)) => {
                let options = LinearOptions::default().with_operands(operands);
                Ok(ops::linear_with(x, matrix, None, options)?)
            }
            (Self::Own(layer), None) => Ok(layer.forward(x)?),
            // In the table's own dtype.
            (Self::Tied(table), None) => Ok(ops::linear(x, table, None)?),
        }
    }
}
