//! A communicator as an engine, beside the group of the host.

use super::communicator::{Communicator, checked};
use crate::engine::{Call, Collective, Engine, Pending};
use crate::error::{Error, Failure, Operation};
use candle_core::{CudaDevice, Device, Tensor};
use cudarc::driver::CudaEvent;
use cudarc::nccl::Id;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Joins the ranks of `host` under an id that its first rank makes.
pub(super) fn connect(
    host: Arc<dyn Engine>,
    device: &Device,
    group: &Arc<str>,
    deadline: Duration,
) -> Result<Arc<dyn Engine>, Failure> {
    let gpu = device.as_cuda_device()?.clone();
    let bytes: Vec<u8> = match host.rank() {
        0 => {
            let id = checked("ncclGetUniqueId", Id::new())?;
            id.internal().iter().map(|byte| *byte as u8).collect()
        }
        _ => vec![0; 128],
    };
    let call = Call {
        operation: Operation::Split,
        group: Arc::clone(group),
        collective: Collective::Broadcast {
            tensor: Tensor::new(bytes, &Device::Cpu)?,
            root: 0,
        },
    };
    let bytes = host.start(call)?.wait(deadline)?.to_vec1::<u8>()?;
    let mut id = [0; 128];
    for (id, byte) in id.iter_mut().zip(bytes) {
        *id = byte as std::ffi::c_char;
    }
    let communicator = Communicator::new(&gpu, host.rank(), host.size(), Id::uninit(id))?;
    Ok(Arc::new(NcclEngine {
        host,
        communicator: Arc::new(communicator),
        device: device.clone(),
        gpu,
    }))
}

#[derive(Debug)]
struct NcclEngine {
    host: Arc<dyn Engine>,
    communicator: Arc<Communicator>,
    device: Device,
    gpu: CudaDevice,
}

impl Engine for NcclEngine {
    fn name(&self) -> &'static str {
        "NCCL"
    }

    fn rank(&self) -> usize {
        self.host.rank()
    }

    fn size(&self) -> usize {
        self.host.size()
    }

    /// Tensors on the CPU, and barriers, go over the group of the host.
    fn start(&self, call: Call) -> Result<Box<dyn Pending>, Failure> {
        let tensor = match call.collective.tensor() {
            Some(tensor) if !tensor.device().is_cpu() => tensor.clone(),
            _ => return self.host.start(call),
        };
        let communicator = Arc::clone(&self.communicator);
        let result = communicator.queue(&self.gpu, &call.collective, &tensor)?;
        let behind = communicator.behind()?;
        Ok(Box::new(Queued {
            communicator,
            result,
            behind,
            _given: tensor,
        }))
    }

    fn split(
        &self,
        group: &Arc<str>,
        color: Option<usize>,
        key: usize,
        deadline: Duration,
    ) -> Result<Option<Arc<dyn Engine>>, Failure> {
        let host = self.host.split(group, color, key, deadline)?;
        let engine = host.map(|host| connect(host, &self.device, group, deadline));
        engine.transpose()
    }

    /// The group of the host ends. It does not know of collectives on the GPUs: a rank that waits for one waits until its deadline.
    fn finish(&self, deadline: Duration) -> Result<(), Failure> {
        self.host.finish(deadline)
    }

    fn give_up(&self, error: &Error) {
        self.host.give_up(error);
    }
}

/// A collective on the stream.
#[derive(Debug)]
struct Queued {
    communicator: Arc<Communicator>,
    result: Tensor,
    behind: CudaEvent,
    _given: Tensor,
}

impl Pending for Queued {
    /// Waits on the host for the stream to come to the end of it: the stream would wait for a rank that does not come for ever, and
    /// nothing on the host would notice.
    fn wait(self: Box<Self>, deadline: Duration) -> Result<Tensor, Failure> {
        let begin = Instant::now();
        while !self.communicator.poll(&self.behind)? {
            let waited = begin.elapsed();
            if waited > deadline {
                return Err(Failure::Deadline {
                    waited,
                    missing: vec![],
                });
            }
            std::thread::yield_now();
        }
        Ok(self.result)
    }
}
