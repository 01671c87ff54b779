//! `candle_nn::embedding`: an embedding with a path.

use super::show;
use crate::{Fp8Module, Visitor};
use candle_core::{Module, Result, Tensor};
use candle_nn::VarBuilder;

/// `candle_nn::Embedding` that knows its checkpoint path.
#[derive(Debug, Clone)]
pub struct Embedding {
    inner: candle_nn::Embedding,
    path: Option<String>,
}

impl Embedding {
    /// `embeddings`: `[vocabulary, hidden_size]`.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self {
            inner: candle_nn::Embedding::new(embeddings, hidden_size),
            path: None,
        }
    }

    /// Sets the checkpoint path.
    pub fn with_path(mut self, path: impl Into<String>) -> Self {
        self.path = Some(path.into());
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

    /// Path in the checkpoint: empty at its root, None if unknown.
    pub fn path(&self) -> Option<&str> {
        self.path.as_deref()
    }
}

impl Module for Embedding {
    /// Integer indexes of any shape `[..]` to `[.., hidden_size]`.
    fn forward(&self, indexes: &Tensor) -> Result<Tensor> {
        let _span = tracing::trace_span!("embedding", path = self.path()).entered();
        self.inner.forward(indexes)
    }
}

impl Fp8Module for Embedding {
    fn visit(&self, visitor: &mut dyn Visitor) {
        show(visitor, self.path(), "weight", self.embeddings());
    }
}

/// Creates or loads an embedding, with candle-nn's initialization.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder<'_>) -> Result<Embedding> {
    let path = Some(vb.prefix());
    Ok(Embedding {
        inner: candle_nn::embedding(in_size, out_size, vb)?,
        path,
    })
}
