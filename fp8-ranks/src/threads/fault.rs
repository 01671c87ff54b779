//! Faults on demand.

use crate::error::Failure;
use candle_core::Tensor;

/// What a rank of [`super::Threads`] does instead of a collective.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Fault {
    /// It does not join. The others reach their deadline, and it ends with them.
    Stall,
    /// It panics.
    Panic,
    /// The collective fails on it.
    Error,
    /// It gives other data than it should.
    Corrupt(fn(&Tensor) -> candle_core::Result<Tensor>),
}

impl Fault {
    /// Gives `tensor` to the function of [`Fault::Corrupt`].
    pub(super) fn corrupted(self, tensor: &Tensor) -> Result<Tensor, Failure> {
        match self {
            Self::Corrupt(change) => Ok(change(tensor)?),
            _ => Ok(tensor.clone()),
        }
    }
}
