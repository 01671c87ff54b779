//! Embedding with a path.

use super::join;
use crate::{Fp8Module, Visitor, VisitorMut};
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// `candle_nn::Embedding` that knows its checkpoint path.
#[derive(Debug, Clone)]
pub struct Embedding {
    inner: candle_nn::Embedding,
    path: String,
}

impl Embedding {
    /// `embeddings`: `[vocabulary, hidden_size]`.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self {
            inner: candle_nn::Embedding::new(embeddings, hidden_size),
            path: String::new(),
        }
    }

    /// Sets the checkpoint path.
    pub fn with_path(mut self, path: impl Into<String>) -> Self {
        self.path = path.into();
        self
    }

    /// `[vocabulary, hidden_size]`.
    pub fn embeddings(&self) -> &Tensor {
        self.inner.embeddings()
    }

    /// Length of one embedding.
    pub fn hidden_size(&self) -> usize {
        self.inner.hidden_size()
    }

    /// Path in the checkpoint, empty if unknown.
    pub fn path(&self) -> &str {
        &self.path
    }
}

impl Module for Embedding {
    /// Integer indexes of any shape `[..]` to `[.., hidden_size]`.
    fn forward(&self, indexes: &Tensor) -> Result<Tensor> {
        self.inner.forward(indexes)
    }
}

impl Fp8Module for Embedding {
    fn visit(&self, visitor: &mut dyn Visitor) {
        visitor.tensor(&join(&self.path, "weight"), self.embeddings());
    }

    fn visit_mut(&mut self, _: &mut dyn VisitorMut) {}
}

/// Creates or loads an embedding, with candle-nn's initialization.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder<'_>) -> Result<Embedding> {
    let path = vb.prefix();
    Ok(Embedding {
        inner: candle_nn::embedding(in_size, out_size, vb)?,
        path,
    })
}
