//! Recording what a stream is asked to do as a CUDA graph, which one call runs again.

use super::arena;
use super::gpu::{Gpu, with_pointers};
use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use candle_core::cuda_backend::DeviceId;
use candle_core::{Device, Tensor};
use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{self, CUgraphNodeType, CUmemorytype};
use std::sync::Mutex;

/// The devices whose streams are being recorded, each with tensors that the graph reads and nobody else promises to keep.
static RECORDED: Mutex<Vec<(DeviceId, Vec<Tensor>)>> = Mutex::new(vec![]);

/// Whether work on this device is being recorded now, instead of done.
pub(crate) fn is_recorded(device: DeviceId) -> bool {
    lock(&RECORDED)
        .iter()
        .any(|(recorded, _)| *recorded == device)
}

/// Lets the graph that is being recorded, if there is one, keep `read`.
pub(super) fn keep(device: DeviceId, read: &Tensor) {
    let mut all = lock(&RECORDED);
    if let Some((_, kept)) = all.iter_mut().find(|(recorded, _)| *recorded == device) {
        kept.push(read.clone());
    }
}

/// Calls `f`, in which candle keeps on the device what it copies there on this thread, such as the sizes of strided tensors: a
/// recording finds what steps before it have copied.
pub(crate) fn with_kept_uploads<R>(device: &Device, f: impl FnOnce() -> R) -> R {
    let _kept = match device {
        Device::Cuda(cuda) => Some(cuda.enable_cuda_graph_htod_cache()),
        _ => None,
    };
    f()
}

/// A recording under way; dropped without [`Recording::end`], it is given up.
pub(crate) struct Recording {
    gpu: Gpu,
    ended: bool,
}

impl Recording {
    /// Begins to record the stream of `device`.
    ///
    /// # Errors
    /// [`Error::NotRecordable`] if streams are ordered by events, or a recording is under way; those of the driver.
    pub(crate) fn begin(device: &Device) -> Result<Self> {
        let gpu = Gpu::new(device)?;
        let context = gpu.stream().context();
        if context.is_managing_stream_synchronization() {
            // Every use of a tensor would wait for an event from before the recording.
            return Err(not_recordable(
                "tensors of this device record events: open it with `fp8_candle::device::open_cuda_untracked`, or with \
                 `Device::new_cuda` as the only device",
            ));
        }
        let id = gpu.device().id();
        if is_recorded(id) {
            return Err(not_recordable("a recording of this device is under way"));
        }
        // Its cells were zeroed before the recording, and would not be zeroed again.
        arena::forget();
        context.check_err().map_err(candle_core::Error::wrap)?;
        // Calls of this thread that cannot be recorded, such as those that wait for the device, become errors.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        let begun = gpu.stream().begin_capture(mode);
        begun.map_err(candle_core::Error::wrap)?;
        lock(&RECORDED).push((id, vec![]));
        Ok(Self { gpu, ended: false })
    }

    /// The graph of what was recorded.
    ///
    /// # Errors
    /// [`Error::NotRecordable`] if it copies from or to the host, or leaves memory allocated; those of the driver.
    pub(crate) fn end(mut self) -> Result<Graph> {
        let (graph, kept) = self.stop()?;
        let Some(graph) = graph else {
            return Err(not_recordable("it launches no work on the device"));
        };
        check(&graph)?;
        Ok(Graph { graph, _kept: kept })
    }

    /// What was recorded, and the tensors that it keeps.
    fn stop(&mut self) -> Result<(Option<CudaGraph>, Vec<Tensor>)> {
        self.ended = true;
        // What the recorded work has allocated is freed by it.
        arena::forget();
        let id = self.gpu.device().id();
        let mut all = lock(&RECORDED);
        let at = all.iter().position(|(recorded, _)| *recorded == id);
        let kept = at.map(|at| all.swap_remove(at).1).unwrap_or_default();
        drop(all);
        let flags = sys::CUgraphInstantiate_flags(0);
        let ended = self.gpu.stream().end_capture(flags);
        // What went wrong while tensors were dropped, where no error can be returned.
        let dropped = self.gpu.stream().context().check_err();
        let graph = ended.map_err(candle_core::Error::wrap)?;
        match dropped {
            Ok(()) => Ok((graph, kept)),
            Err(error) => Err(not_recordable(format!(
                "it drops a tensor from before the recording, or waits for the device ({error})"
            ))),
        }
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if !self.ended
            && let Err(error) = self.stop()
        {
            tracing::debug!("a recording was given up: {error}");
        }
    }
}

/// A recorded step.
pub(crate) struct Graph {
    graph: CudaGraph,
    _kept: Vec<Tensor>,
}

impl Graph {
    /// Runs it, after everything that the stream was asked to do before.
    pub(crate) fn launch(&self) -> Result<()> {
        Ok(self.graph.launch().map_err(candle_core::Error::wrap)?)
    }
}

fn not_recordable(why: impl Into<String>) -> Error {
    Error::NotRecordable(why.into())
}

/// Refuses a graph that would read or write memory of the host, which is gone or has other values when the graph runs, and one that
/// does not free what it allocates: it could not run twice.
fn check(graph: &CudaGraph) -> Result<()> {
    let (mut allocated, mut copies) = (0i64, 0);
    for node in nodes(graph)? {
        let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: a node of a living graph, and a place for the result.
        driver("cuGraphNodeGetType", unsafe {
            sys::cuGraphNodeGetType(node, &raw mut kind)
        })?;
        match kind {
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_ALLOC => allocated += 1,
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEM_FREE => allocated -= 1,
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_HOST => copies += 1,
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => {
                let mut copy = std::mem::MaybeUninit::<sys::CUDA_MEMCPY3D>::zeroed();
                // SAFETY: a node that copies, and a place for its parameters, which are numbers and pointers: zeros are valid.
                let copy = unsafe {
                    let status = sys::cuGraphMemcpyNodeGetParams(node, copy.as_mut_ptr());
                    driver("cuGraphMemcpyNodeGetParams", status)?;
                    copy.assume_init()
                };
                let host = CUmemorytype::CU_MEMORYTYPE_HOST;
                if copy.srcMemoryType == host || copy.dstMemoryType == host {
                    copies += 1;
                }
            }
            _ => {}
        }
    }
    if copies > 0 {
        return Err(not_recordable(format!(
            "it copies {copies} times from or to memory of the host"
        )));
    }
    if allocated != 0 {
        return Err(not_recordable(format!(
            "{allocated} tensors that it makes are still in use at its end: return them instead of keeping them"
        )));
    }
    Ok(())
}

fn nodes(graph: &CudaGraph) -> Result<Vec<sys::CUgraphNode>> {
    let mut count = 0;
    // SAFETY: the graph lives, and is only read.
    driver("cuGraphGetNodes", unsafe {
        sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count)
    })?;
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: as above, with places for as many nodes.
    driver("cuGraphGetNodes", unsafe {
        sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &raw mut count)
    })?;
    nodes.truncate(count);
    Ok(nodes)
}

fn driver(call: &'static str, status: sys::CUresult) -> Result<()> {
    if status == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let status = format!("{status:?}");
    Err(Error::Driver { call, status })
}

/// Copies the values of `from` into the memory of `to`, both contiguous and of one shape and dtype.
pub(crate) fn copy_into(from: &Tensor, to: &Tensor) -> Result<()> {
    if (from.dtype(), from.dims()) != (to.dtype(), to.dims()) {
        return Err(not_recordable(format!(
            "it makes {:?} of {:?} where it made {:?} of {:?} before",
            from.dims(),
            from.dtype(),
            to.dims(),
            to.dtype()
        )));
    }
    let gpu = Gpu::of(to)?;
    let bytes = to.elem_count() * to.dtype().size_in_bytes();
    if bytes == 0 {
        return Ok(());
    }
    with_pointers(&gpu, [from, to], |[from, to]| {
        // SAFETY: both have this many bytes, `with_pointers` has checked that they are contiguous, and the stream orders the copy
        // before both can be freed.
        unsafe { gpu.copy(from, to, bytes) }
    })
}
