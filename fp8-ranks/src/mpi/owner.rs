//! The thread that owns MPI.

use super::library::{Communicator, Library};
use super::numbered::{Numbered, Place};
use super::roll_call::{LONG, RollCall, disagreement};
use super::transfer::Transfer;
use crate::engine::Call;
use crate::error::Failure;
use candle_core::Tensor;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// What a thread asks for; the answer goes through the sender.
pub(super) enum Job {
    Start {
        communicator: usize,
        call: Call,
        answer: Sender<Result<Tensor, Failure>>,
    },
    Split {
        communicator: usize,
        /// The group's.
        name: Arc<str>,
        color: Option<usize>,
        key: usize,
        answer: Sender<Result<Option<Group>, Failure>>,
    },
    Finish {
        answer: Sender<Result<(), Failure>>,
    },
}

/// A communicator as other threads know it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Group {
    pub(super) communicator: usize,
    pub(super) rank: usize,
    pub(super) size: usize,
}

/// After this time without a result, and that which data need at 100 bytes per microsecond, the thread sleeps between tests: a
/// rank that saves a file lets the others wait, and they should leave it the processor. Data in the middle of a transfer would be
/// slowed down by it, since MPI moves a part of them in each test.
const IDLE: Duration = Duration::from_millis(50);
const BYTES_PER_MICROSECOND: u64 = 100;
const NAP: Duration = Duration::from_micros(50);

/// Starts the thread and MPI on it: where to send jobs, the group of all, the name of the library.
pub(super) fn start(largest: usize) -> Result<(Sender<Job>, Group, String), Failure> {
    let (jobs, received) = channel();
    let (answer, started) = channel();
    let thread = thread::Builder::new().name("MPI".to_owned());
    let spawned = thread.spawn(move || {
        let owner = Library::start().and_then(|library| {
            let world = library.world()?;
            let (version, group) = (library.version(), group(0, &world));
            let roll_call = world.split(Some(0), world.rank)?.ok_or(Failure::Ended)?;
            let owner = Owner {
                library,
                communicators: vec![Numbered::world(world)],
                roll_call: RollCall::new(roll_call),
                transfers: vec![],
                largest,
            };
            Ok((owner, group, version))
        });
        match owner {
            Ok((owner, group, version)) => {
                if answer.send(Ok((group, version))).is_ok() {
                    owner.serve(&received);
                }
            }
            Err(failure) => drop(answer.send(Err(failure))),
        }
    });
    if let Err(error) = spawned {
        return Err(candle_core::Error::from(error).into());
    }
    let (group, version) = started.recv().map_err(|_| Failure::Ended)??;
    Ok((jobs, group, version))
}

fn group(communicator: usize, of: &Communicator) -> Group {
    Group {
        communicator,
        rank: of.rank,
        size: of.size,
    }
}

struct Owner {
    library: Library,
    /// That of all ranks first.
    communicators: Vec<Numbered>,
    roll_call: RollCall,
    transfers: Vec<UnderWay>,
    largest: usize,
}

/// An operation under way.
struct UnderWay {
    transfer: Transfer,
    place: Place,
    answer: Sender<Result<Tensor, Failure>>,
}

impl Owner {
    /// Works until MPI is finished or nobody can ask for anything. An answer that nobody waits for any more is dropped.
    fn serve(mut self, jobs: &Receiver<Job>) {
        let mut last = Instant::now();
        loop {
            let job = if self.transfers.is_empty() {
                jobs.recv().ok()
            } else {
                match jobs.try_recv() {
                    Ok(job) => Some(job),
                    Err(TryRecvError::Empty) => {
                        if self.poll() {
                            last = Instant::now();
                        } else if last.elapsed() < self.patience() {
                            thread::yield_now();
                        } else {
                            if last.elapsed() >= LONG {
                                self.attend_roll_call();
                            }
                            thread::sleep(NAP);
                        }
                        continue;
                    }
                    Err(TryRecvError::Disconnected) => None,
                }
            };
            last = Instant::now();
            match job {
                Some(Job::Start {
                    communicator,
                    call,
                    answer,
                }) => {
                    let numbered = &mut self.communicators[communicator];
                    let place = numbered.next(call.operation, call.group);
                    let communicator = &numbered.communicator;
                    match Transfer::start(communicator, call.collective, self.largest) {
                        Ok(transfer) => self.transfers.push(UnderWay {
                            transfer,
                            place,
                            answer,
                        }),
                        Err(failure) => drop(answer.send(Err(failure))),
                    }
                }
                Some(Job::Split {
                    communicator,
                    name,
                    color,
                    key,
                    answer,
                }) => {
                    let split = self.communicators[communicator].split(name, color, key);
                    let split = split.map(|new| new.map(|new| self.add(new)));
                    drop(answer.send(split));
                }
                Some(Job::Finish { answer }) => {
                    drop(answer.send(self.finish()));
                    return;
                }
                None => return,
            }
        }
    }

    fn add(&mut self, new: Numbered) -> Group {
        let group = group(self.communicators.len(), &new.communicator);
        self.communicators.push(new);
        group
    }

    /// Says for what this rank has been waiting.
    fn attend_roll_call(&mut self) {
        let Some(first) = self.transfers.first() else {
            return;
        };
        if let Err(failure) = self.roll_call.attend(first.place) {
            for UnderWay { answer, .. } in self.transfers.drain(..) {
                drop(answer.send(Err(failure.clone())));
            }
        }
    }

    /// Ends MPI when all ranks have come to their end. Operations that nobody has waited for are completed before: a rank with one is
    /// not at its end.
    fn finish(mut self) -> Result<(), Failure> {
        let begin = Instant::now();
        loop {
            self.poll();
            let first = self.transfers.first();
            let place = first.map_or_else(|| self.communicators[0].end(), |first| first.place);
            self.roll_call.join(place)?;
            match self.roll_call.poll()? {
                Some(places) if self.transfers.is_empty() => {
                    if let Some(failure) = disagreement(&places, &self.communicators) {
                        return Err(failure);
                    }
                    // This rank is not at its end there if it joined with an operation that has been completed since.
                    if places.iter().all(Place::is_end) {
                        return self.library.finish();
                    }
                }
                _ if begin.elapsed() < IDLE => thread::yield_now(),
                _ => thread::sleep(NAP),
            }
        }
    }

    /// How long what is under way may take before the thread sleeps between tests.
    fn patience(&self) -> Duration {
        let transfers = self.transfers.iter();
        let bytes = transfers.map(|under_way| under_way.transfer.bytes());
        IDLE + Duration::from_micros(bytes.sum::<u64>() / BYTES_PER_MICROSECOND)
    }

    /// Whether an operation has ended.
    fn poll(&mut self) -> bool {
        let before = self.transfers.len();
        self.transfers.retain_mut(|under_way| {
            let Some(answer) = under_way.transfer.poll().transpose() else {
                return true;
            };
            drop(under_way.answer.send(answer));
            false
        });
        self.transfers.len() < before
    }
}
