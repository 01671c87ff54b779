//! The thread that owns MPI.

use super::library::{Communicator, Library};
use super::transfer::Transfer;
use crate::engine::Collective;
use crate::error::Failure;
use candle_core::Tensor;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

/// What a thread asks for; the answer goes through the sender.
pub(super) enum Job {
    Start {
        communicator: usize,
        collective: Collective,
        answer: Sender<Result<Tensor, Failure>>,
    },
    Split {
        communicator: usize,
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
            let owner = Owner {
                library,
                communicators: vec![world],
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
    communicators: Vec<Communicator>,
    transfers: Vec<(Transfer, Sender<Result<Tensor, Failure>>)>,
    largest: usize,
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
                    collective,
                    answer,
                }) => {
                    let communicator = &self.communicators[communicator];
                    match Transfer::start(communicator, collective, self.largest) {
                        Ok(transfer) => self.transfers.push((transfer, answer)),
                        Err(failure) => drop(answer.send(Err(failure))),
                    }
                }
                Some(Job::Split {
                    communicator,
                    color,
                    key,
                    answer,
                }) => {
                    let split = self.communicators[communicator].split(color, key);
                    let split = split.map(|new| new.map(|new| self.add(new)));
                    drop(answer.send(split));
                }
                Some(Job::Finish { answer }) if self.transfers.is_empty() => {
                    drop(answer.send(self.library.finish()));
                    return;
                }
                Some(Job::Finish { answer }) => {
                    let failure = Failure::Unsupported {
                        engine: "MPI",
                        problem: format!(
                            "{} operations are under way; wait for them before `finish`",
                            self.transfers.len()
                        ),
                    };
                    drop(answer.send(Err(failure)));
                }
                None => return,
            }
        }
    }

    fn add(&mut self, new: Communicator) -> Group {
        let group = group(self.communicators.len(), &new);
        self.communicators.push(new);
        group
    }

    /// How long what is under way may take before the thread sleeps between tests.
    fn patience(&self) -> Duration {
        let bytes = self.transfers.iter().map(|(transfer, _)| transfer.bytes());
        IDLE + Duration::from_micros(bytes.sum::<u64>() / BYTES_PER_MICROSECOND)
    }

    /// Whether an operation has ended.
    fn poll(&mut self) -> bool {
        let before = self.transfers.len();
        self.transfers.retain_mut(|(transfer, answer)| {
            match transfer.poll() {
                Ok(None) => return true,
                Ok(Some(tensor)) => drop(answer.send(Ok(tensor))),
                Err(failure) => drop(answer.send(Err(failure))),
            }
            false
        });
        self.transfers.len() < before
    }
}
