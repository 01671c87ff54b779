//! Properties of GPUs, queried once, and the check that a stream is used as its kind allows.

use crate::base::error::{Error, Result};
use crate::base::sync::lock;
use candle_core::cuda_backend::DeviceId;
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaStream, result,
    sys::{
        CUdevice_attribute_enum::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
        CUmemPool_attribute_enum::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
    },
};
use candle_core::{CudaDevice, backend::BackendDevice};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;

/// Constant properties of a chip.
#[derive(Debug)]
pub(super) struct Chip {
    pub(super) name: String,
    pub(super) capability: (i32, i32),
    pub(super) multiprocessors: usize,
}

/// Chips by ordinal, since asking the driver takes longer than a launch; and the owning thread of each device whose
/// stream is the calling thread's.
#[derive(Default)]
struct Known {
    chips: HashMap<usize, Arc<Chip>>,
    owners: HashMap<DeviceId, ThreadId>,
}

static KNOWN: Mutex<Option<Known>> = Mutex::new(None);

fn known() -> MutexGuard<'static, Option<Known>> {
    lock(&KNOWN)
}

impl Chip {
    /// The chip of `device`, whose stream is `stream`.
    ///
    /// # Errors
    /// [`Error::StreamOfAnotherThread`] if this is not the first thread to use a device whose stream is the caller's.
    pub(super) fn of(device: &CudaDevice, stream: &CudaStream) -> Result<Arc<Self>> {
        let context = stream.context();
        // This thread may not be the one that opened the device.
        context.bind_to_thread().map_err(candle_core::Error::wrap)?;
        let mut known = known();
        let known = known.get_or_insert_default();
        if is_per_thread(stream) {
            let this = std::thread::current().id();
            if *known.owners.entry(device.id()).or_insert(this) != this {
                return Err(Error::StreamOfAnotherThread(device.location()));
            }
        }
        if let Some(chip) = known.chips.get(&context.ordinal()) {
            return Ok(chip.clone());
        }
        let chip = Arc::new(Self::ask(context)?);
        known.chips.insert(context.ordinal(), chip.clone());
        Ok(chip)
    }

    fn ask(context: &CudaContext) -> Result<Self> {
        let wrap = candle_core::Error::wrap;
        keep_freed_memory(context)?;
        let count = context
            .attribute(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(wrap)?;
        Ok(Self {
            name: context.name().map_err(wrap)?,
            capability: context.compute_capability().map_err(wrap)?,
            multiprocessors: usize::try_from(count).unwrap_or(1).max(1),
        })
    }
}

/// `CU_STREAM_PER_THREAD`, which means the stream of the thread that makes a call. candle's `Device::new_cuda` opens it.
/// cudarc compares handles, so it takes the streams of two threads for the same one and never lets one wait for the other.
fn is_per_thread(stream: &CudaStream) -> bool {
    const PER_THREAD: usize = 2;
    stream.cu_stream() as usize == PER_THREAD
}

/// By default the memory pool of tensors returns all freed memory to the system at every synchronization, and each step
/// allocates it again. With this, other programs on the GPU get it only when this one ends.
fn keep_freed_memory(context: &CudaContext) -> Result<()> {
    if !context.has_async_alloc() {
        return Ok(());
    }
    let mut all = u64::MAX;
    // SAFETY: the context's own device; a pool just got from it; the attribute is a u64.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())
            .map_err(candle_core::Error::wrap)?;
        result::mem_pool::set_attribute(
            pool,
            CU_MEMPOOL_ATTR_RELEASE_THRESHOLD,
            (&raw mut all).cast(),
        )
        .map_err(candle_core::Error::wrap)?;
    }
    Ok(())
}
