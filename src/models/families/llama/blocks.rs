//! The language model as a row of blocks.

use super::causal::{Caches, Call, Part};
use super::{Layer, Llama};
use crate::models::error::Result;
use crate::models::families::Blocks;
use crate::models::layers::{Projection, Rows, token_rows};
use candle_core::Tensor;

impl Blocks for Llama {
    type Block = Layer;

    fn blocks(&self) -> &[Layer] {
        &self.layers
    }

    fn enter(&self, ids: &Tensor) -> Result<Tensor> {
        let ids = token_rows(ids, self.config.vocab_size)?;
        Ok(candle_core::Module::forward(&self.embedding, &ids)?.to_dtype(self.dtype)?)
    }

    fn pass(&self, block: &Layer, x: &Tensor) -> Result<Tensor> {
        let (count, tokens, _) = x.dims3()?;
        let rows = Rows {
            count,
            ..Rows::default()
        };
        let call = Call {
            part: Part::Rows(rows),
            rope: self.rope(0, tokens)?,
        };
        block.forward(x, &[call], Caches::None)
    }

    fn projections(block: &mut Layer) -> Vec<&mut Projection> {
        block.projections()
    }
}
