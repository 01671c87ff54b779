//! Maximum of amaxes over the ranks of a job.

use crate::base::error::Result;
use candle_core::Tensor;

/// The ranks that train one model together and must use the same scales.
///
/// [`ReductionGroup::all_reduce_max`] is called with one vector per table, with an entry for every row and 0 where this rank
/// recorded nothing: a rank whose experts got no tokens sends as much as the others. It is called
/// - when an outermost training guard closes, for every model used in it (calibrating guards too),
/// - for gradients, when a model is next used in such a guard, or at `end_step`.
///
/// So every rank has to use the same models in each of its guards, though not the same layers. Tables come in the order of
/// the names of their first rows.
pub trait ReductionGroup: std::fmt::Debug + Send + Sync {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// Elementwise maximum of `amaxes` (f32 `[rows]`) over the ranks, on the same device.
    ///
    /// # Errors
    /// Report your own as [`crate::Error::Group`]. The step then changes no scale, and loses no amax.
    fn all_reduce_max(&self, amaxes: &Tensor) -> Result<Tensor>;
}

/// A job with one process: the maximum is the amax itself.
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
