//! A rank's end of the meeting place.

use super::fault::Fault;
use super::hub::{Hub, Place, Taken};
use super::round::Given;
use crate::engine::{Call, Engine, Pending};
use crate::error::{Error, Failure};
use candle_core::Tensor;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// The engine's name.
pub(super) const NAME: &str = "threads";

/// One rank in one group.
#[derive(Debug)]
pub(super) struct ThreadEngine {
    place: Place,
    /// Collectives of this rank in this group: all ranks count alike.
    rounds: AtomicU64,
    shared: Arc<Shared>,
}

/// What a rank's groups share.
#[derive(Debug)]
struct Shared {
    hub: Arc<Hub>,
    /// This rank in the job.
    rank: usize,
    /// Collectives that it has started, in all groups.
    started: AtomicUsize,
    /// What goes wrong at which of them.
    faults: Vec<(usize, Fault)>,
}

/// A rank that has dropped all of its groups can join no collective any more, though its thread may go on.
impl Drop for Shared {
    fn drop(&mut self) {
        // A panic ends the job with its message, which comes when the thread has unwound.
        if !std::thread::panicking() {
            self.hub.leave(self.rank);
        }
    }
}

impl ThreadEngine {
    /// A rank in the group of all.
    pub(super) fn new(
        hub: Arc<Hub>,
        rank: usize,
        size: usize,
        faults: Vec<(usize, Fault)>,
    ) -> Self {
        Self {
            place: Place {
                group: 0,
                rank,
                size,
            },
            rounds: AtomicU64::new(0),
            shared: Arc::new(Shared {
                hub,
                rank,
                started: AtomicUsize::new(0),
                faults,
            }),
        }
    }

    fn give(&self, given: Given) -> Result<u64, Failure> {
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        self.shared.hub.give(self.place, round, given)?;
        Ok(round)
    }
}

impl Engine for ThreadEngine {
    fn name(&self) -> &'static str {
        NAME
    }

    fn rank(&self) -> usize {
        self.place.rank
    }

    fn size(&self) -> usize {
        self.place.size
    }

    fn start(&self, mut call: Call) -> Result<Box<dyn Pending>, Failure> {
        let Shared {
            hub,
            rank,
            started,
            faults,
        } = &*self.shared;
        let count = started.fetch_add(1, Ordering::Relaxed);
        for (_, fault) in faults.iter().filter(|(at, _)| *at == count) {
            match fault {
                Fault::Stall => return Err(hub.stall()),
                Fault::Panic => panic!("the fault that the test asked for on rank {rank}"),
                Fault::Error => return Err(Failure::Injected),
                Fault::Corrupt(_) => {
                    let given = call.collective.tensor();
                    let given = given.map(|tensor| fault.corrupted(tensor)).transpose()?;
                    if let Some(given) = given {
                        call.collective = call.collective.with_tensor(given);
                    }
                }
            }
        }
        Ok(Box::new(Waiting {
            hub: Arc::clone(hub),
            place: self.place,
            round: self.give(Given::Call(call))?,
        }))
    }

    fn split(
        &self,
        _: &Arc<str>,
        color: Option<usize>,
        key: usize,
        deadline: Duration,
    ) -> Result<Option<Arc<dyn Engine>>, Failure> {
        let round = self.give(Given::Split { color, key })?;
        let place = match self.shared.hub.take(self.place, round, deadline)? {
            Taken::Group(place) => place,
            Taken::Tensor(_) => unreachable!("a split has groups as its result"),
        };
        let engine = |place| {
            Arc::new(Self {
                place,
                rounds: AtomicU64::new(0),
                shared: Arc::clone(&self.shared),
            })
        };
        Ok(place.map(|place| engine(place) as _))
    }

    fn finish(&self, deadline: Duration) -> Result<(), Failure> {
        self.shared.hub.finish(self.shared.rank, deadline)
    }

    fn give_up(&self, error: &Error) {
        self.shared.hub.break_for_all(Failure::Rank {
            rank: self.shared.rank,
            message: error.to_string().into(),
        });
    }
}

/// A collective that this rank has joined.
#[derive(Debug)]
struct Waiting {
    hub: Arc<Hub>,
    place: Place,
    round: u64,
}

impl Pending for Waiting {
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Tensor, Failure> {
        match self.hub.take(self.place, self.round, deadline)? {
            Taken::Tensor(tensor) => Ok(tensor),
            Taken::Group(_) => unreachable!("a collective has a tensor as its result"),
        }
    }
}
