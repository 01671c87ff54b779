//! A communicator as an engine.

use super::owner::{Group, Job, start};
use crate::engine::{Call, Engine, Pending};
use crate::error::{Error, Failure};
use crate::failure;
use candle_core::{Device, Tensor};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::Duration;

/// Starts MPI: the group of all processes, and the name of the library. Once in a process. `largest`: the most elements in one
/// call.
pub(crate) fn join(largest: usize) -> Result<(Arc<dyn Engine>, String), Failure> {
    let (jobs, group, library) = start(largest)?;
    Ok((Arc::new(MpiEngine { jobs, group }), library))
}

/// One communicator, for any thread of its process.
#[derive(Debug)]
struct MpiEngine {
    jobs: Sender<Job>,
    group: Group,
}

impl MpiEngine {
    /// Sends a job to the thread that owns MPI; nobody listens after the end.
    fn ask<T>(
        &self,
        job: impl FnOnce(Sender<Result<T, Failure>>) -> Job,
    ) -> Result<Receiver<Result<T, Failure>>, Failure> {
        let (answer, receiver) = channel();
        self.jobs.send(job(answer)).map_err(|_| Failure::Ended)?;
        Ok(receiver)
    }
}

fn answer<T>(from: &Receiver<Result<T, Failure>>, deadline: Duration) -> Result<T, Failure> {
    match from.recv_timeout(deadline) {
        Ok(answer) => answer,
        Err(RecvTimeoutError::Timeout) => Err(Failure::Deadline {
            waited: deadline,
            missing: vec![],
        }),
        Err(RecvTimeoutError::Disconnected) => Err(Failure::Ended),
    }
}

impl Engine for MpiEngine {
    fn name(&self) -> &'static str {
        "MPI"
    }

    fn rank(&self) -> usize {
        self.group.rank
    }

    fn size(&self) -> usize {
        self.group.size
    }

    fn start(&self, call: Call) -> Result<Box<dyn Pending>, Failure> {
        let tensor = call.collective.tensor().cloned();
        let device = tensor
            .as_ref()
            .map_or(Device::Cpu, |own| own.device().clone());
        let call = match tensor {
            Some(tensor) if !device.is_cpu() => {
                let here = tensor.to_device(&Device::Cpu)?;
                Call {
                    collective: call.collective.with_tensor(here),
                    ..call
                }
            }
            _ => call,
        };
        let communicator = self.group.communicator;
        let receiver = self.ask(|answer| Job::Start {
            communicator,
            call,
            answer,
        })?;
        Ok(Box::new(Waiting { receiver, device }))
    }

    fn split(
        &self,
        group: &Arc<str>,
        color: Option<usize>,
        key: usize,
        deadline: Duration,
    ) -> Result<Option<Arc<dyn Engine>>, Failure> {
        let communicator = self.group.communicator;
        let receiver = self.ask(|answer| Job::Split {
            communicator,
            name: Arc::clone(group),
            color,
            key,
            answer,
        })?;
        let group = answer(&receiver, deadline)?;
        let engine = |group| Self {
            jobs: self.jobs.clone(),
            group,
        };
        Ok(group.map(|group| Arc::new(engine(group)) as _))
    }

    fn finish(&self, deadline: Duration) -> Result<(), Failure> {
        let receiver = self.ask(|answer| Job::Finish { answer })?;
        answer(&receiver, deadline)
    }

    /// Ends this process; the launcher ends the others. A group of one rank within a larger job too: others wait for this rank
    /// elsewhere.
    fn give_up(&self, error: &Error) {
        failure::end(&error.to_string())
    }
}

#[derive(Debug)]
struct Waiting {
    receiver: Receiver<Result<Tensor, Failure>>,
    device: Device,
}

impl Pending for Waiting {
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Tensor, Failure> {
        let result = answer(&self.receiver, deadline)?;
        Ok(result.to_device(&self.device)?)
    }
}
