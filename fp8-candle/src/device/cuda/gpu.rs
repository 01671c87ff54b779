//! A CUDA device as kernels need it: its chip, its memory, pointers to tensors.

use super::chip::Chip;
use crate::base::error::{Error, Result, internal};
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DevicePtrMut, SyncOnDrop, result,
};
use candle_core::cuda_backend::{CudaDType, CudaStorageSlice};
use candle_core::op::BackpropOp;
use candle_core::{CudaDevice, CudaStorage, DType, Device, Shape, Storage, Tensor};
use std::sync::Arc;

/// A CUDA device of candle.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    chip: Arc<Chip>,
}

impl Gpu {
    /// The GPU of `x`.
    pub(crate) fn of(x: &Tensor) -> Result<Self> {
        Self::new(x.device())
    }

    /// The GPU of `device`.
    ///
    /// # Errors
    /// If it is not a CUDA device, or one whose stream belongs to another thread.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let Device::Cuda(cuda) = device else {
            return Err(Error::Device(device.location()));
        };
        let stream = cuda.cuda_stream();
        let chip = Chip::of(cuda, &stream)?;
        Ok(Self {
            device: cuda.clone(),
            stream,
            chip,
        })
    }

    /// candle's device.
    pub(crate) fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// The stream of everything that runs on this device.
    pub(crate) fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Name of the chip, from the driver.
    pub(crate) fn chip_name(&self) -> &str {
        &self.chip.name
    }

    /// Compute capability, major and minor.
    pub(crate) fn capability(&self) -> (i32, i32) {
        self.chip.capability
    }

    /// Number of streaming multiprocessors.
    pub(crate) fn multiprocessors(&self) -> usize {
        self.chip.multiprocessors
    }

    /// Memory for `len` elements of `dtype`, with no defined values. Not every driver allocates nothing, so there is always
    /// memory for one.
    ///
    /// # Errors
    /// [`Error::DeviceMemory`] if there is not enough.
    pub(crate) fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer> {
        // SAFETY: kernels write every element before anything reads it.
        let storage = unsafe { self.device.alloc_uninit(&Shape::from(len.max(1)), dtype) };
        self.buffer(storage, dtype, len)
    }

    /// Memory for `len` elements of `dtype`, all bits 0.
    ///
    /// # Errors
    /// As [`Gpu::alloc`].
    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Result<Buffer> {
        let storage = self.device.zeros_impl(&Shape::from(len.max(1)), dtype);
        self.buffer(storage, dtype, len)
    }

    fn buffer(
        &self,
        storage: candle_core::Result<CudaStorage>,
        dtype: DType,
        len: usize,
    ) -> Result<Buffer> {
        match storage {
            Ok(storage) => {
                let ptr = pointer(&storage, 0, &self.stream)?.0;
                let stream = self.stream.clone();
                Ok(Buffer {
                    storage,
                    ptr,
                    len,
                    stream,
                })
            }
            Err(source) => {
                let free = self
                    .stream
                    .context()
                    .mem_get_info()
                    .map_or(0, |(free, _)| free);
                Err(Error::DeviceMemory {
                    bytes: len * dtype.size_in_bytes(),
                    what: format!("{len} values of {}", dtype.as_str()),
                    free,
                    chip: self.chip.name.clone(),
                    source_text: source.to_string(),
                })
            }
        }
    }

    /// Copies `len` bytes on this device, in stream order.
    ///
    /// # Safety
    /// Both addresses must be of `len` bytes of this device's memory, alive until the stream has come to the copy.
    pub(crate) unsafe fn copy(&self, from: u64, to: u64, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let copied = unsafe { result::memcpy_dtod_async(to, from, len, self.stream.cu_stream()) };
        Ok(copied.map_err(candle_core::Error::wrap)?)
    }

    /// Fills `len` bytes on this device with ones, which make NaN of any dtype, in stream order.
    ///
    /// # Safety
    /// As [`Gpu::copy`].
    pub(crate) unsafe fn fill(&self, at: u64, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        let filled = unsafe { result::memset_d8_async(at, 0xFF, len, self.stream.cu_stream()) };
        Ok(filled.map_err(candle_core::Error::wrap)?)
    }

    /// A tensor of zeros, of any size.
    pub(crate) fn zero_tensor(&self, dtype: DType, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        self.zeros(dtype, shape.elem_count())?.into_tensor(shape)
    }

    /// A tensor on this device from values on the host.
    pub(crate) fn upload<T: candle_core::WithDType>(&self, values: &[T]) -> Result<Tensor> {
        Ok(Tensor::from_slice(
            values,
            values.len(),
            &Device::Cuda(self.device.clone()),
        )?)
    }
}

/// New memory on a GPU, before it becomes a tensor.
#[derive(Debug)]
pub(crate) struct Buffer {
    storage: CudaStorage,
    ptr: u64,
    len: usize,
    stream: Arc<CudaStream>,
}

impl Buffer {
    /// Address of the first element.
    pub(crate) fn ptr(&self) -> u64 {
        self.ptr
    }

    /// As a storage for a custom op or [`crate::graph::Ready`], once the kernels that write it are launched.
    pub(crate) fn into_storage(mut self) -> Storage {
        record_write(&mut self.storage, &self.stream);
        Storage::Cuda(self.storage)
    }

    /// As a tensor outside any graph; `shape` has as many elements as were allocated. As [`Buffer::into_storage`], after the
    /// launches.
    pub(crate) fn into_tensor(self, shape: impl Into<Shape>) -> Result<Tensor> {
        let shape = shape.into();
        if shape.elem_count() != self.len {
            internal!(
                "{} elements do not make a tensor of shape {shape:?}",
                self.len
            );
        }
        Ok(Tensor::from_storage(
            self.into_storage(),
            shape,
            BackpropOp::none(),
            false,
        ))
    }
}

/// `x`, contiguous and at a multiple of 16 bytes, as kernels and cuBLASLt read vectors: a copy if it is not. Whole tensors are at
/// multiples of 256 bytes.
pub(crate) fn aligned(x: &Tensor) -> Result<Tensor> {
    let x = x.contiguous()?;
    let offset = x.layout().start_offset() * x.dtype().size_in_bytes();
    Ok(match offset.is_multiple_of(16) {
        true => x,
        false => x.force_contiguous()?,
    })
}

/// Calls `f` with the addresses of the first elements of contiguous tensors on `gpu`. Until `f` returns, their memory stays
/// alive and is known to be in use: `f` launches the kernels that use it.
///
/// # Errors
/// If a tensor is strided or on another device, or if `f` fails.
pub(crate) fn with_pointers<const N: usize, R>(
    gpu: &Gpu,
    tensors: [&Tensor; N],
    f: impl FnOnce([u64; N]) -> Result<R>,
) -> Result<R> {
    with_pointer_list(gpu, &tensors, |pointers| {
        let mut array = [0; N];
        array.copy_from_slice(pointers);
        f(array)
    })
}

/// [`with_pointers`] for any number of tensors.
pub(crate) fn with_pointer_list<R>(
    gpu: &Gpu,
    tensors: &[&Tensor],
    f: impl FnOnce(&[u64]) -> Result<R>,
) -> Result<R> {
    for tensor in tensors {
        if !tensor.is_contiguous() {
            internal!(
                "a CUDA kernel takes contiguous tensors, got strides {:?}",
                tensor.stride()
            );
        }
    }
    with_view_pointers(gpu, tensors, f)
}

/// [`with_pointers`] for tensors of any strides, which are passed to the kernel.
pub(crate) fn with_view_pointers<R>(
    gpu: &Gpu,
    tensors: &[&Tensor],
    f: impl FnOnce(&[u64]) -> Result<R>,
) -> Result<R> {
    let storages: Vec<_> = tensors.iter().map(|t| t.storage_and_layout()).collect();
    let mut pointers = Vec::with_capacity(tensors.len());
    let mut guards = Vec::with_capacity(tensors.len());
    for (storage, layout) in &storages {
        let Storage::Cuda(storage) = &**storage else {
            internal!("a CUDA kernel takes tensors on a CUDA device");
        };
        if !storage.device().same_device(&gpu.device) {
            return Err(Error::DeviceMismatch {
                op: "a CUDA kernel",
                what: "a tensor",
                expected: gpu.device.location(),
                got: storage.device().location(),
            });
        }
        let (pointer, guard) = pointer(storage, layout.start_offset(), &gpu.stream)?;
        pointers.push(pointer);
        guards.push(guard);
    }
    f(&pointers)
}

/// Address of element `offset` of `storage`, with a guard that records the use of the memory.
fn pointer<'a>(
    storage: &'a CudaStorage,
    offset: usize,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    fn at<'a, T: CudaDType>(
        slice: &'a CudaSlice<T>,
        offset: usize,
        stream: &'a CudaStream,
    ) -> (u64, SyncOnDrop<'a>) {
        let (base, guard) = slice.device_ptr(stream);
        (base + (offset * size_of::<T>()) as u64, guard)
    }
    Ok(match &storage.slice {
        CudaStorageSlice::U8(slice) => at(slice, offset, stream),
        CudaStorageSlice::U32(slice) => at(slice, offset, stream),
        CudaStorageSlice::I16(slice) => at(slice, offset, stream),
        CudaStorageSlice::I32(slice) => at(slice, offset, stream),
        CudaStorageSlice::I64(slice) => at(slice, offset, stream),
        CudaStorageSlice::BF16(slice) => at(slice, offset, stream),
        CudaStorageSlice::F16(slice) => at(slice, offset, stream),
        CudaStorageSlice::F32(slice) => at(slice, offset, stream),
        CudaStorageSlice::F64(slice) => at(slice, offset, stream),
        CudaStorageSlice::F8E4M3(slice) => at(slice, offset, stream),
        _ => internal!("no kernel takes {:?}", storage.dtype()),
    })
}

/// Tells cudarc that everything launched so far may have written to `storage`, for other devices' streams to wait for.
fn record_write(storage: &mut CudaStorage, stream: &CudaStream) {
    fn record<T>(slice: &mut CudaSlice<T>, stream: &CudaStream) {
        let _recorded_when_dropped = slice.device_ptr_mut(stream);
    }
    match &mut storage.slice {
        CudaStorageSlice::U8(slice) => record(slice, stream),
        CudaStorageSlice::U32(slice) => record(slice, stream),
        CudaStorageSlice::BF16(slice) => record(slice, stream),
        CudaStorageSlice::F16(slice) => record(slice, stream),
        CudaStorageSlice::F32(slice) => record(slice, stream),
        CudaStorageSlice::F64(slice) => record(slice, stream),
        _ => {}
    }
}
