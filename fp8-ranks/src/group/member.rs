//! One rank's place in a group: its engine, its name, its counters.

use super::options::GroupOptions;
use crate::engine::{Call, Collective, Engine, Pending};
use crate::error::{Error, Failure, Operation, Result};
use crate::failure::note;
use crate::traffic::{Counters, sent};
use candle_core::Tensor;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

#[derive(Debug)]
pub(super) struct Member {
    pub(super) name: Arc<str>,
    pub(super) engine: Arc<dyn Engine>,
    /// The same ranks in a group of their own for amaxes. They are reduced at other places of a program than everything else,
    /// so a disagreement between ranks on one communicator never mixes with data of the other.
    pub(super) amaxes: Arc<dyn Engine>,
    pub(super) options: GroupOptions,
    pub(super) counters: Counters,
    /// The steps of guards with this group.
    pub(super) steps: AtomicU64,
    /// The groups that it was made from, whose ranks include its own. Weak: a group ends when its handles are dropped.
    pub(super) within: Vec<Weak<Member>>,
}

impl Member {
    pub(super) fn size(&self) -> usize {
        self.engine.size()
    }

    pub(super) fn rank(&self) -> usize {
        self.engine.rank()
    }

    /// Starts a collective of the engine, and counts its bytes.
    pub(super) fn start(
        &self,
        engine: &dyn Engine,
        operation: Operation,
        collective: Collective,
    ) -> Result<Box<dyn Pending>> {
        note(operation, &self.name);
        let bytes = sent(&collective, self.rank(), self.size());
        let call = Call {
            operation,
            group: Arc::clone(&self.name),
            collective,
        };
        let started = call
            .check(self.rank(), self.size())
            .and_then(|()| engine.start(call));
        let pending = self.checked(operation, started)?;
        self.counters.bytes(operation, bytes);
        Ok(pending)
    }

    pub(super) fn wait(&self, operation: Operation, pending: Box<dyn Pending>) -> Result<Tensor> {
        self.checked(operation, pending.wait(self.options.deadline))
    }

    /// Both.
    pub(super) fn run(
        &self,
        engine: &dyn Engine,
        operation: Operation,
        collective: Collective,
    ) -> Result<Tensor> {
        let pending = self.start(engine, operation, collective)?;
        self.wait(operation, pending)
    }

    /// The end of the engine.
    pub(super) fn finish(&self) -> Result<()> {
        let operation = Operation::Finish;
        note(operation, &self.name);
        let finished = self.engine.finish(self.options.deadline);
        self.checked(operation, finished)
    }

    /// Adds the place to a failure, and lets the other ranks know, because they wait for this one.
    pub(super) fn checked<T>(
        &self,
        operation: Operation,
        result: std::result::Result<T, Failure>,
    ) -> Result<T> {
        result.map_err(|failure| {
            let error = Error::Collective {
                rank: self.rank(),
                size: self.size(),
                group: Arc::clone(&self.name),
                operation,
                failure,
            };
            self.engine.give_up(&error);
            error
        })
    }
}
