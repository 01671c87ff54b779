//! Maximum of amaxes over the ranks of a job.

use crate::base::error::Result;
use candle_core::Tensor;
use std::sync::atomic::AtomicU64;

/// The ranks that train one model together and must use the same scales.
///
/// [`ReductionGroup::all_reduce_max`] is called with one vector per table, with an entry for every row and 0 where this rank
/// recorded nothing: a rank whose experts got no tokens sends as much as the others. Three more entries say whether this rank has
/// used the table, and carry a number made from the names of the rows, the number of the step and the kind of amaxes, with its
/// complement: the maximum leaves both unchanged only if all ranks have sent the same. It is called
/// - when an outermost training guard closes, for every model that this thread has trained with a group (calibrating guards: for the
///   models used in them; a guard that is dropped does not call it for several ranks),
/// - for gradients, when the thread next trains any model, or at `end_step`.
///
/// So a rank may leave out layers, and whole models that it has used before; but all ranks have to abort the same steps, and a model's
/// first step has to be the same on all. Tables come in the order of the names of their first rows. Ranks that disagree get
/// [`crate::Error::RanksDisagree`].
pub trait ReductionGroup: std::fmt::Debug + Send + Sync {
    /// Number of ranks.
    fn ranks(&self) -> usize;

    /// This process among the ranks, from 0. With it, the error of ranks that disagree says what each of them has reduced, after one more
    /// call of [`ReductionGroup::all_reduce_max`] on all of them.
    fn rank(&self) -> Option<usize> {
        None
    }

    /// Elementwise maximum of `amaxes` (f32 `[rows]`) over the ranks, on the same device.
    ///
    /// # Errors
    /// Report your own as [`crate::Error::Group`]. The step then changes no scale, and loses no amax.
    fn all_reduce_max(&self, amaxes: &Tensor) -> Result<Tensor>;

    /// The same number for all handles of one group, and another for each group: its address, unless handles are clones.
    fn identity(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// Counts the steps of the guards with this group on this rank, aborted ones too: ranks compare it, so that one that has aborted a
    /// step alone is noticed. All uses of the group share the counter; without one, this is not checked.
    fn steps(&self) -> Option<&AtomicU64> {
        None
    }
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
