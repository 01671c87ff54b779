//! The language model as a row of blocks.

use super::causal::{Caches, Call, Part};
use super::{Feedforward, Layer, Llama, SelfAttention};
use crate::models::error::Result;
use crate::models::families::{Blocks, NormReaders};
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
            rope: self.rope(0, tokens, 0)?,
            operands: self.operands,
        };
        block.forward(x, &[call], Caches::None)
    }

    fn projections(block: &mut Layer) -> Vec<&mut Projection> {
        block.projections()
    }

    fn adders(block: &mut Layer) -> Vec<&mut Projection> {
        let attention = match &mut block.attention {
            SelfAttention::Heads(attention) => attention.output(),
            SelfAttention::Latent(attention) => attention.output(),
        };
        let mut layers = vec![attention];
        match &mut block.feedforward {
            Feedforward::Dense(mlp) => layers.push(mlp.output()),
            // A router gives experts a part of the tokens each.
            Feedforward::Mixture(_) => {}
        }
        layers
    }

    fn norms(block: &mut Layer) -> Vec<NormReaders<'_>> {
        let (layers, mut norms) = match &mut block.attention {
            SelfAttention::Heads(attention) => (attention.readers(), vec![]),
            SelfAttention::Latent(attention) => attention.readers(),
        };
        norms.push(NormReaders {
            norm: &mut block.input_norm,
            router: None,
            layers,
        });
        let (router, layers) = match &mut block.feedforward {
            Feedforward::Dense(mlp) => (None, mlp.readers().collect()),
            Feedforward::Mixture(moe) => moe.readers(),
        };
        norms.push(NormReaders {
            norm: &mut block.post_norm,
            router,
            layers,
        });
        norms
    }
}
