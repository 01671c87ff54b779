//! Operations under way.

use super::member::Member;
use crate::engine::{Collective, Pending};
use crate::error::{Failure, Operation, Result};
use candle_core::Tensor;
use std::sync::Arc;

/// What is done with an engine's result.
pub(super) type Then = Box<dyn FnOnce(Tensor) -> Result<Tensor, Failure> + Send>;

pub(super) enum Stage {
    /// The engine's result, after `then`, is the result.
    Last {
        pending: Box<dyn Pending>,
        then: Then,
    },
    /// `combine` makes this rank's part of the result, which is then gathered.
    Pieces {
        pending: Box<dyn Pending>,
        combine: Then,
        counts: Vec<usize>,
        then: Then,
    },
}

/// An operation that was started without waiting for its end.
///
/// All ranks call [`Started::wait`] (and [`Started::advance`]) at the same place among their other calls: a second part of the
/// operation may start there. A value that is dropped instead lets the others wait until this rank leaves or their deadline passes.
#[must_use = "the other ranks wait for `wait`"]
pub struct Started {
    member: Arc<Member>,
    operation: Operation,
    stage: Stage,
}

impl std::fmt::Debug for Started {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            member, operation, ..
        } = self;
        write!(f, "{operation} of group {:?}, started", member.name)
    }
}

impl Started {
    pub(super) fn new(member: Arc<Member>, operation: Operation, stage: Stage) -> Self {
        Self {
            member,
            operation,
            stage,
        }
    }

    /// Waits for the first part of an operation of two, and starts the second: the sum in rank order is an exchange of pieces
    /// and a gathering of sums. With several operations under way, `advance` on all and then `wait` on all lets the
    /// second parts overlap too. Does nothing if there is no second part left.
    ///
    /// # Errors
    /// As [`Started::wait`].
    pub fn advance(self) -> Result<Self> {
        let Self {
            member,
            operation,
            stage,
        } = self;
        let stage = match stage {
            Stage::Pieces {
                pending,
                combine,
                counts,
                then,
            } => {
                let pieces = member.wait(operation, pending)?;
                let own = member.checked(operation, combine(pieces))?;
                let gather = Collective::AllGather { own, counts };
                let pending = member.start(&*member.engine, operation, gather)?;
                Stage::Last { pending, then }
            }
            last => last,
        };
        Ok(Self::new(member, operation, stage))
    }

    /// The result.
    ///
    /// # Errors
    /// [`crate::Error::Collective`] if this or another rank failed, if the ranks disagree about what they call, or if the
    /// group's deadline passed.
    pub fn wait(self) -> Result<Tensor> {
        let Self {
            member,
            operation,
            stage,
        } = self.advance()?;
        let Stage::Last { pending, then } = stage else {
            unreachable!("`advance` leaves the last stage");
        };
        let result = member.wait(operation, pending)?;
        member.checked(operation, then(result))
    }
}
