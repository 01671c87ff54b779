//! Opening a GPU so that work from all threads runs in one order.

use crate::base::error::Result;
use candle_core::Device;

/// The GPU `ordinal` with its own stream, on which everything runs in the order of the calls: one thread can read a tensor
/// that another has computed.
///
/// candle's [`Device::new_cuda`] and [`Device::cuda_if_available`] open the stream of the calling thread instead, where two
/// threads race without noticing. FP8 operations accept such a device on one thread and refuse it on every other.
///
/// Tensors record two events each, by which cudarc orders the streams of several devices; [`open_cuda_untracked`] does without.
/// Kernels that write to a tensor in place (optimizers, amaxes) do not record that: synchronize before you copy such a tensor
/// to another CUDA device.
///
/// # Errors
/// If there is no such GPU, the driver refuses it, or this is a build without the feature `cuda`.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let device = fp8_candle::device::open_cuda(0)?;
/// let x = candle_core::Tensor::zeros((2, 3), candle_core::DType::F32, &device)?;
/// std::thread::spawn(move || x.to_vec2::<f32>()).join().unwrap()?;
/// # Ok(())
/// # }
/// ```
pub fn open_cuda(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    first_use(&device)?;
    Ok(device)
}

/// [`open_cuda`] without events: two fewer to make for every tensor, and about one record less for each operand of each
/// operation, some 450 in a training step of an encoder layer.
///
/// # Safety
/// All work on the device is in one stream only while no other stream exists: until all its tensors are dropped, do not
/// copy them to another CUDA device without synchronizing both, and do not fork its stream or create more of them.
///
/// # Errors
/// As [`open_cuda`].
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// // SAFETY: the only CUDA device of this program, and nothing here asks for its stream.
/// let device = unsafe { fp8_candle::device::open_cuda_untracked(0) }?;
/// assert!(device.is_cuda());
/// # Ok(())
/// # }
/// ```
pub unsafe fn open_cuda_untracked(ordinal: usize) -> Result<Device> {
    let device = Device::new_cuda_with_stream(ordinal)?;
    #[cfg(feature = "cuda")]
    if let Device::Cuda(cuda) = &device {
        // SAFETY: the caller keeps to one stream.
        unsafe { cuda.disable_event_tracking() };
    }
    first_use(&device)?;
    Ok(device)
}

/// Sets up the memory pool now, not in the middle of a program.
fn first_use(device: &Device) -> Result<()> {
    #[cfg(feature = "cuda")]
    super::cuda::gpu::Gpu::new(device)?;
    super::backend(device)?;
    Ok(())
}
