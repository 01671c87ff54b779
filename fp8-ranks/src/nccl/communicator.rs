//! NCCL's communicator, and one collective on it.

use crate::engine::Collective;
use crate::error::Failure;
use candle_core::cuda_backend::CudaDType;
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Storage, Tensor};
use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DeviceRepr, DriverError, ValidAsZeroBits};
use cudarc::nccl::result::NcclError;
use cudarc::nccl::{Comm, Id, NcclType, ReduceOp, group_end, group_start};
use std::ffi::CStr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A communicator that any thread may use, one at a time.
#[derive(Debug)]
pub(super) struct Communicator {
    comm: Mutex<Movable>,
    stream: Arc<CudaStream>,
}

#[derive(Debug)]
struct Movable(Comm);

// SAFETY: NCCL binds a communicator to a device and not to a thread. It must not be used by two threads at once, which the mutex
// around this value prevents; each call makes the device's context current on its thread first.
unsafe impl Send for Movable {}

/// What NCCL said.
pub(super) fn checked<T>(call: &'static str, result: Result<T, NcclError>) -> Result<T, Failure> {
    result.map_err(|NcclError(code)| {
        // SAFETY: it takes any code, and returns a text that is never freed.
        let text = unsafe { CStr::from_ptr(cudarc::nccl::sys::ncclGetErrorString(code)) };
        Failure::Library {
            call,
            code: code as i32,
            message: text.to_string_lossy().into_owned(),
        }
    })
}

/// What CUDA's driver said.
fn driver<T>(result: Result<T, DriverError>) -> Result<T, Failure> {
    result.map_err(|error| candle_core::Error::wrap(error).into())
}

impl Communicator {
    /// Waits for all ranks that join under this id.
    pub(super) fn new(
        device: &CudaDevice,
        rank: usize,
        size: usize,
        id: Id,
    ) -> Result<Self, Failure> {
        let stream = device.cuda_stream();
        driver(stream.context().bind_to_thread())?;
        let comm = Comm::from_rank(Arc::clone(&stream), rank, size, id);
        let comm = checked("ncclCommInitRank", comm)?;
        Ok(Self {
            comm: Mutex::new(Movable(comm)),
            stream,
        })
    }

    fn lock(&self) -> MutexGuard<'_, Movable> {
        self.comm.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event behind all that is queued.
    pub(super) fn behind(&self) -> Result<CudaEvent, Failure> {
        driver(self.stream.record_event(None))
    }

    /// An error of an operation that runs, for instance of a rank that is gone.
    pub(super) fn poll(&self, event: &CudaEvent) -> Result<bool, Failure> {
        driver(event.try_is_complete())
    }

    /// Queues a collective over a flat tensor on the device: the result, which is there when the stream comes to it.
    pub(super) fn queue(
        &self,
        device: &CudaDevice,
        collective: &Collective,
        tensor: &Tensor,
    ) -> Result<Tensor, Failure> {
        match tensor.dtype() {
            DType::U8 => self.queue_as::<u8>(device, collective, tensor),
            DType::U32 => self.queue_as::<u32>(device, collective, tensor),
            DType::I64 => self.queue_as::<i64>(device, collective, tensor),
            DType::F16 => self.queue_as::<half::f16>(device, collective, tensor),
            DType::BF16 => self.queue_as::<half::bf16>(device, collective, tensor),
            DType::F32 => self.queue_as::<f32>(device, collective, tensor),
            DType::F64 => self.queue_as::<f64>(device, collective, tensor),
            got => Err(Failure::DType {
                got,
                expected: "U8, U32, I64, F16, BF16, F32 or F64",
            }),
        }
    }

    fn queue_as<T: NcclType + CudaDType + DeviceRepr + ValidAsZeroBits>(
        &self,
        device: &CudaDevice,
        collective: &Collective,
        tensor: &Tensor,
    ) -> Result<Tensor, Failure> {
        driver(self.stream.context().bind_to_thread())?;
        let len = collective.result_len();
        // There is no memory without elements.
        let mut out = device.alloc_zeros::<T>(len.max(1))?;
        let (storage, layout) = tensor.storage_and_layout();
        let Storage::Cuda(storage) = &*storage else {
            return Err(Failure::Unsupported {
                engine: "NCCL",
                problem: "a tensor that is not on the device of its group".to_owned(),
            });
        };
        let own = storage.as_cuda_slice::<T>()?;
        let begin = layout.start_offset();
        let comm = self.lock();
        queue(&comm.0, collective, own, begin, &mut out, len)?;
        drop(comm);
        let out = Storage::Cuda(CudaStorage::wrap_cuda_slice(out, device.clone()));
        let out = Tensor::from_storage(out, len.max(1), BackpropOp::none(), false);
        Ok(out.narrow(0, 0, len)?)
    }
}

/// Parts from `begin` on, one after the other: where each begins and ends.
fn parts(begin: usize, counts: &[usize]) -> impl Iterator<Item = std::ops::Range<usize>> {
    counts.iter().scan(begin, |end, count| {
        let begin = *end;
        *end += count;
        Some(begin..*end)
    })
}

fn queue<T: NcclType>(
    comm: &Comm,
    collective: &Collective,
    own: &CudaSlice<T>,
    begin: usize,
    out: &mut CudaSlice<T>,
    len: usize,
) -> Result<(), Failure> {
    match collective {
        // Nothing to send on any rank: the result is empty on all.
        Collective::AllGather { .. }
        | Collective::Broadcast { .. }
        | Collective::MaxOfBits { .. }
        | Collective::EngineSum { .. }
            if len == 0 => {}
        Collective::AllGather { counts, .. } => {
            // One broadcast from each rank, as one operation: counts may differ.
            let count = counts[comm.rank()];
            grouped(|| {
                for (root, part) in parts(0, counts)
                    .enumerate()
                    .filter(|(_, part)| !part.is_empty())
                {
                    let sent = (root == comm.rank()).then(|| own.slice(begin..begin + count));
                    let mut part = out.slice_mut(part);
                    let result = comm.broadcast(sent.as_ref(), &mut part, root as i32);
                    checked("ncclBroadcast", result)?;
                }
                Ok(())
            })?;
        }
        Collective::AllToAll { send, receive, .. } => grouped(|| {
            let sent = parts(begin, send).zip(parts(0, receive)).enumerate();
            for (peer, (sent, received)) in sent {
                if !sent.is_empty() {
                    let result = comm.send(&own.slice(sent), peer as i32);
                    checked("ncclSend", result)?;
                }
                if !received.is_empty() {
                    let result = comm.recv(&mut out.slice_mut(received), peer as i32);
                    checked("ncclRecv", result)?;
                }
            }
            Ok(())
        })?,
        Collective::Broadcast { root, .. } => {
            let own = own.slice(begin..begin + len);
            let result = comm.broadcast(Some(&own), out, *root as i32);
            checked("ncclBroadcast", result)?;
        }
        Collective::MaxOfBits { .. } => {
            let own = own.slice(begin..begin + len);
            checked("ncclAllReduce", comm.all_reduce(&own, out, &ReduceOp::Max))?;
        }
        Collective::EngineSum { .. } => {
            let own = own.slice(begin..begin + len);
            checked("ncclAllReduce", comm.all_reduce(&own, out, &ReduceOp::Sum))?;
        }
        Collective::Barrier => unreachable!("the host's group has barriers"),
    }
    Ok(())
}

/// Calls as one operation. The group ends whether or not a call failed: the library counts open groups.
fn grouped(calls: impl FnOnce() -> Result<(), Failure>) -> Result<(), Failure> {
    checked("ncclGroupStart", group_start())?;
    let result = calls();
    let ended = checked("ncclGroupEnd", group_end());
    result.and(ended.map(drop))
}
