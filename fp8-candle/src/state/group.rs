//! Maximum of amaxes over the ranks of a job.

use crate::error::Result;
use candle_core::Tensor;

/// The ranks that train one model together and must use the same scales.
///
/// [`ReductionGroup::all_reduce_max`] is called with one vector per table, an entry for every row, 0 where this rank has
/// recorded nothing: ranks whose experts got no tokens send as much as the others. It is called
/// - when an outermost training guard closes, for every model used in it (calibrating guards too),
/// - for gradients, when a model is next used in such a guard, or at `end_step`.
///
/// So every rank has to use the same models in each of its guards, of whatever layers; tables come in the order of the names
/// of their first rows.
pub trait ReductionGroup: std::fmt::Debug + Send + Sync {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Elementwise maximum of `amaxes` (f32 `[slots]`) over the ranks, on the same device.
    fn all_reduce_max(&self, amaxes: &Tensor) -> Result<Tensor>;
}

/// A job of one process: the maximum is the amax itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct SingleProcess;

impl ReductionGroup for SingleProcess {
    fn ranks(&self) -> usize {
        1
    }

    fn all_reduce_max(&self, amaxes: &Tensor) -> Result<Tensor> {
        Ok(amaxes.clone())
    }
}
