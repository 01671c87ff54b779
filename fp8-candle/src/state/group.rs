//! Maximum of amaxes over the ranks of a job.

use candle_core::{Result, Tensor};

/// The ranks that train one model together and must use the same scales.
///
/// Every rank calls [`ReductionGroup::all_reduce_max`] equally often and with vectors of the same length: the slots of
/// the layers used in the step, sorted by name.
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
