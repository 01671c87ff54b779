//! Communicators as ranks can compare them.

use super::library::Communicator;
use crate::error::{Failure, Operation};
use rapidhash::v3::rapidhash_v3;
use std::sync::Arc;

/// What a rank is at: the last collective that it has started on a communicator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// Its operation, or [`Operation::Finish`] for a rank at its end. `None`: one that this program does not know.
    pub(super) operation: Option<Operation>,
    /// [`Numbered::id`].
    pub(super) communicator: u64,
    /// It is the n-th one there.
    pub(super) number: u64,
}

impl Place {
    /// Whether the rank starts nothing more.
    pub(super) fn is_end(&self) -> bool {
        self.operation == Some(Operation::Finish)
    }
}

/// A communicator that counts its collectives.
#[derive(Debug)]
pub(super) struct Numbered {
    pub(super) communicator: Communicator,
    /// The group's name, for messages.
    pub(super) name: Arc<str>,
    /// The same on all of its ranks, and another one on every other communicator. Its index in a rank's list is neither: ranks are in
    /// different groups.
    pub(super) id: u64,
    /// Collectives that this rank has started.
    pub(super) started: u64,
    splits: u64,
}

impl Numbered {
    /// The communicator of all ranks.
    pub(super) fn world(communicator: Communicator) -> Self {
        Self {
            communicator,
            name: "world".into(),
            id: 0,
            started: 0,
            splits: 0,
        }
    }

    /// Counts a collective.
    pub(super) fn next(&mut self, operation: Operation, name: Arc<str>) -> Place {
        self.name = name;
        self.started += 1;
        Place {
            operation: Some(operation),
            communicator: self.id,
            number: self.started,
        }
    }

    /// Where a rank is that starts nothing more.
    pub(super) fn end(&self) -> Place {
        Place {
            operation: Some(Operation::Finish),
            communicator: self.id,
            number: self.started,
        }
    }

    /// [`Communicator::split`]. `name` is this group's, and that of the new one until it says another.
    pub(super) fn split(
        &mut self,
        name: Arc<str>,
        color: Option<usize>,
        key: usize,
    ) -> Result<Option<Self>, Failure> {
        self.name = Arc::clone(&name);
        self.splits += 1;
        // What only the members of the new one have in common.
        let words = [self.id, self.splits, color.unwrap_or(0) as u64];
        let id = rapidhash_v3(&words.map(u64::to_le_bytes).concat());
        let new = self.communicator.split(color, key)?;
        Ok(new.map(|communicator| Self {
            communicator,
            name,
            id,
            started: 0,
            splits: 0,
        }))
    }
}
