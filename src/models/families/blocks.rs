//! A model as a chain of blocks that run one at a time, as a search of weights needs it.

use crate::models::error::Result;
use crate::models::layers::Projection;
use crate::nn::{NamedTensor, RmsNorm};
use candle_core::Tensor;

/// A model that is run a block at a time.
pub(crate) trait Blocks {
    /// One of its layers, with everything between its input and its output. Clones share tensors.
    type Block: Clone;

    /// The blocks, first to last.
    fn blocks(&self) -> &[Self::Block];

    /// What the first block gets for token ids `[1, tokens]`.
    fn enter(&self, ids: &Tensor) -> Result<Tensor>;

    /// What a block makes of its input.
    fn pass(&self, block: &Self::Block, x: &Tensor) -> Result<Tensor>;

    /// The linear layers of a block.
    fn projections(block: &mut Self::Block) -> Vec<&mut Projection>;

    /// The linear layers of a block that write what is added to a residual, if what reads the sum divides it by its norm.
    fn adders(block: &mut Self::Block) -> Vec<&mut Projection>;

    /// The norms of a block whose results are read only by linear layers and a router.
    fn norms(block: &mut Self::Block) -> Vec<NormReaders<'_>>;
}

/// A norm, and all that reads its result.
pub(crate) struct NormReaders<'a> {
    pub(crate) norm: &'a mut RmsNorm,
    /// The weight of a router of experts.
    pub(crate) router: Option<&'a mut NamedTensor>,
    pub(crate) layers: Vec<&'a mut Projection>,
}
