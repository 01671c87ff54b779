//! The encoder as a row of blocks.

use super::{Bert, Layer};
use crate::models::error::Result;
use crate::models::families::{Blocks, NormReaders};
use crate::models::layers::Projection;
use candle_core::Tensor;

impl Blocks for Bert {
    type Block = Layer;

    fn blocks(&self) -> &[Layer] {
        &self.layers
    }

    fn enter(&self, ids: &Tensor) -> Result<Tensor> {
        self.embedded(ids)
    }

    fn pass(&self, block: &Layer, x: &Tensor) -> Result<Tensor> {
        let (batch, tokens, _) = x.dims3()?;
        // No token is padding.
        let hidden = Tensor::zeros((batch, 1, 1, tokens), x.dtype(), x.device())?;
        block.forward(x, &hidden)
    }

    fn projections(block: &mut Layer) -> Vec<&mut Projection> {
        block.projections().into()
    }

    fn adders(_block: &mut Layer) -> Vec<&mut Projection> {
        // The norm comes after the sum: residuals of all tokens are of one size.
        vec![]
    }

    fn norms(_block: &mut Layer) -> Vec<NormReaders<'_>> {
        // The residual reads them too.
        vec![]
    }
}
