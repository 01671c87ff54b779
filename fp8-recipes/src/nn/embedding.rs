//! `candle_nn::embedding`: an embedding with a path.

use super::identity::{SharedState, path_and_state, path_methods};
use super::scaled_parameter::{freeze, scaled};
use crate::array::Array;
use crate::autocast::{Fp8State, OperatorCasts};
use crate::module::{Fp8Operator, LayerKind, show};
use crate::{Fp8Module, Visitor};
use candle_core::{Device, Module, Result, Tensor};
use candle_nn::VarBuilder;
use fp8_candle::ops;
use fp8_scaled::Parameter;
use std::sync::Arc;
use tracing::span::EnteredSpan;

/// `candle_nn::Embedding` that knows its checkpoint path.
///
/// ```
/// # use candle_core::{Device, Module, Tensor};
/// # use fp8_recipes::nn;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let table = Tensor::new(&[[1f32, 2.], [3., 4.], [5., 6.]], &Device::Cpu)?;
/// let embedding = nn::Embedding::new(table, 2).with_path("wte");
/// let y = embedding.forward(&Tensor::new(&[2u32, 0], &Device::Cpu)?)?;
/// assert_eq!(y.to_vec2::<f32>()?, [[5., 6.], [1., 2.]]);
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
pub struct Embedding {
    table: Parameter,
    hidden_size: usize,
    path: Option<Arc<str>>,
    state: SharedState,
}

impl Embedding {
    /// `embeddings`: `[vocabulary, hidden_size]`.
    pub fn new(embeddings: Tensor, hidden_size: usize) -> Self {
        Self {
            table: Parameter::gathered(&embeddings),
            hidden_size,
            path: None,
            state: SharedState::default(),
        }
    }

    /// `[vocabulary, hidden_size]`.
    pub fn embeddings(&self) -> &Tensor {
        self.table.tensor()
    }

    /// The same embedding without gradients for its table, as [`Linear::frozen`](super::Linear::frozen).
    #[must_use]
    pub fn frozen(mut self) -> Self {
        freeze(&mut self.table);
        self
    }

    /// Length of one embedding.
    pub fn hidden_size(&self) -> usize {
        self.hidden_size
    }

    /// The rows `indexes` of the table, plain or scaled.
    ///
    /// # Errors
    /// If an index is not in the table; [`Error::NotScaled`](crate::Error::NotScaled) for scaled rows of a plain table.
    pub fn lookup<A: Array>(&self, indexes: &Tensor) -> crate::Result<A> {
        A::create(
            || Ok(self.forward(indexes)?),
            || {
                let _span = self.entered();
                let table = scaled(&self.table, self.path(), "weight")?;
                Ok(table.embedding(indexes)?)
            },
        )
    }

    /// Enters the span of a forward pass.
    fn entered(&self) -> EnteredSpan {
        tracing::trace_span!("embedding", path = self.path()).entered()
    }

    /// The table, or its value where it is a scaled parameter.
    fn plain(&self) -> Result<Tensor> {
        Ok(self.table.value(self.embeddings().dtype())?)
    }
}

impl Module for Embedding {
    /// Integer indexes of any shape `[..]` to `[.., hidden_size]`.
    fn forward(&self, indexes: &Tensor) -> Result<Tensor> {
        let _span = self.entered();
        OperatorCasts::around(self.state.prepared(), self.path(), |casts| match casts {
            None => Ok(ops::embedding(&self.plain()?, indexes)?),
            Some(casts) => {
                let table = casts.weight(&self.plain()?)?;
                Ok(casts.output(&ops::embedding(&table, indexes)?)?)
            }
        })
    }
}

path_methods!(Embedding, state);

impl Fp8Operator for Embedding {
    path_and_state!();

    fn kind(&self) -> LayerKind {
        LayerKind::Embedding
    }

    fn device(&self) -> Option<&Device> {
        Some(self.embeddings().device())
    }
}

impl Fp8Module for Embedding {
    fn visit(&self, visitor: &mut dyn Visitor) {
        show(visitor, self.path(), "weight", self.embeddings());
        visitor.operator(self);
    }
}

/// Creates or loads an embedding, with candle-nn's initialization.
pub fn embedding(in_size: usize, out_size: usize, vb: VarBuilder<'_>) -> Result<Embedding> {
    let path = vb.prefix();
    let inner = candle_nn::embedding(in_size, out_size, vb)?;
    Ok(Embedding::new(inner.embeddings().clone(), out_size).with_path(path))
}
