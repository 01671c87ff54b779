//! Tensors that ranks hold in parts: a part is cast with the scales of the whole.

use crate::base::error::{Error, Result};
use crate::cast::state::ReductionGroup;
use candle_core::Tensor;
use fp8_core::{Contraction, Granularity, ScaleGrid};
use std::sync::Arc;

type Group = Option<Arc<dyn ReductionGroup>>;

/// The ranks that hold the other parts of a matrix `[product of the leading dims, last dim]`.
///
/// Scales that are made from the tensor itself are then made from the amaxes of all parts, so that each part has the codes that it
/// has in the whole. Delayed scales come from the table, whose amaxes the guard's group reduces; their first scale, if it is made from
/// the tensor, is that of the whole too. All ranks cast the same tensors in the same order.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Shards {
    /// The ranks with other rows of the same columns; None if this rank has all rows.
    pub rows: Group,
    /// The ranks with other columns of the same rows; None if this rank has all columns.
    pub cols: Group,
    /// All ranks with other parts; None if this rank has the whole.
    pub all: Group,
}

impl Shards {
    /// A matrix in parts.
    pub fn new(rows: Group, cols: Group, all: Group) -> Self {
        Self { rows, cols, all }
    }

    /// Whether this rank has the whole.
    pub fn is_whole(&self) -> bool {
        self.all.is_none()
    }

    /// The amaxes of the whole for the scales of this part. `amax` has those of `grid`, for a product that sums over `contraction`.
    ///
    /// # Errors
    /// If blocks of scales lie across parts, and if the group fails.
    pub(crate) fn reduce(
        &self,
        amax: Tensor,
        grid: &ScaleGrid,
        (granularity, contraction): (Granularity, Contraction),
    ) -> Result<Tensor> {
        let group = match granularity {
            Granularity::Tensorwise => &self.all,
            // Amaxes of rows span all columns, and amaxes of columns all rows. The grid of a part with one row or column does not tell
            // which it has.
            Granularity::Rowwise => match contraction {
                Contraction::Cols => &self.cols,
                Contraction::Rows => &self.rows,
            },
            Granularity::Blockwise { .. } | Granularity::Mx => {
                let across = [
                    (&self.rows, grid.rows(), grid.block_rows()),
                    (&self.cols, grid.cols(), grid.block_cols()),
                ];
                for (group, len, block) in across {
                    if group.is_some() && !len.is_multiple_of(block.max(1)) {
                        return Err(Error::ShardedBlock { len, block });
                    }
                }
                &None
            }
        };
        match group {
            None => Ok(amax),
            Some(group) => {
                let flat = amax.flatten_all()?;
                Ok(group.all_reduce_max(&flat)?.reshape(amax.shape())?)
            }
        }
    }

    /// The amax `[1]` of the whole, from that of this part.
    pub(crate) fn reduce_whole(&self, amax: Tensor) -> Result<Tensor> {
        match &self.all {
            None => Ok(amax),
            Some(group) => group.all_reduce_max(&amax),
        }
    }
}

/// Equal if the groups are the same.
impl PartialEq for Shards {
    fn eq(&self, other: &Self) -> bool {
        let same = |a: &Group, b: &Group| match (a, b) {
            (None, None) => true,
            (Some(a), Some(b)) => a.identity() == b.identity(),
            _ => false,
        };
        same(&self.rows, &other.rows)
            && same(&self.cols, &other.cols)
            && same(&self.all, &other.all)
    }
}

/// The parts that a linear layer casts.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct LayerShards {
    /// Tokens by in_features.
    pub input: Shards,
    /// out_features by in_features.
    pub weight: Shards,
    /// Tokens by out_features.
    pub grad_output: Shards,
}

impl LayerShards {
    /// A layer whose operands are in parts.
    pub fn new(input: Shards, weight: Shards, grad_output: Shards) -> Self {
        Self {
            input,
            weight,
            grad_output,
        }
    }
}
