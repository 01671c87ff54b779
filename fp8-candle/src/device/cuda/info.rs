//! A description of a CUDA device for programs to print.

use super::gpu::Gpu;
use super::lt;
use crate::base::error::{Error, Result};
use candle_core::Device;
use cudarc::driver::sys::{CUresult, cuDriverGetVersion};

/// A CUDA device and the libraries for it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaInfo {
    /// Name of the chip.
    pub chip: String,
    /// Compute capability, major and minor.
    pub capability: (i32, i32),
    /// Number of streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: usize,
    /// Newest CUDA version that the driver supports: 12090 is 12.9.
    pub driver: i32,
    /// Version of cuBLASLt: 120900 is 12.9.
    pub cublas_lt: usize,
}

/// Chip, driver and library of a CUDA device.
///
/// # Errors
/// If `device` is not a CUDA device, or the driver does not answer.
pub fn cuda_info(device: &Device) -> Result<CudaInfo> {
    let gpu = Gpu::new(device)?;
    let mut driver = 0;
    // SAFETY: `driver` is a valid place for the result.
    let status = unsafe { cuDriverGetVersion(&raw mut driver) };
    if status != CUresult::CUDA_SUCCESS {
        let status = format!("{status:?}");
        return Err(Error::Driver {
            call: "cuDriverGetVersion",
            status,
        });
    }
    let memory = gpu.stream().context().total_mem();
    Ok(CudaInfo {
        chip: gpu.chip_name().to_string(),
        capability: gpu.capability(),
        multiprocessors: gpu.multiprocessors(),
        memory: memory.map_err(candle_core::Error::wrap)?,
        driver,
        cublas_lt: lt::version(),
    })
}
