//! The one place that launches kernels.

use super::gpu::Gpu;
use super::kernels::{Arg, Kernel, Shape};
use super::loaded;
use crate::base::error::{Result, internal};
use candle_core::cuda_backend::cudarc::driver::{LaunchConfig, PushKernelArg};

/// Launches `kernel` on `gpu`'s stream.
///
/// # Safety
/// The pointers in `args` must be what the kernel expects: to its element types, in bounds for the sizes that are passed,
/// alive until the stream has run the kernel, and not written by anything else until then.
pub(crate) unsafe fn launch(gpu: &Gpu, kernel: &Kernel, shape: Shape, args: &[Arg]) -> Result<()> {
    if !args
        .iter()
        .map(|arg| arg.letter())
        .eq(kernel.parameters.chars())
    {
        internal!(
            "kernel {} takes parameters {:?}, got {args:?}",
            kernel.name,
            kernel.parameters
        );
    }
    let loaded = loaded::function(gpu, kernel)?;
    let function = loaded.with_shared(shape.shared)?;
    let mut builder = gpu.stream().launch_builder(function);
    for arg in args {
        match arg {
            Arg::Ptr(value) | Arg::Len(value) => builder.arg(value),
            Arg::Int(value) => builder.arg(value),
            Arg::Float(value) => builder.arg(value),
        };
    }
    let mut grid = shape.grid;
    if shape.resident {
        grid.0 = grid.0.min(loaded.resident(gpu, shape)?);
    }
    let config = LaunchConfig {
        grid_dim: grid,
        block_dim: (shape.threads, 1, 1),
        shared_mem_bytes: shape.shared,
    };
    // SAFETY: number and types of the arguments were compared with the declaration, which a test compares with the PTX; the
    // caller guarantees the pointers.
    match unsafe { builder.launch(config) } {
        Ok(_) => Ok(()),
        Err(error) => Err(candle_core::Error::wrap(error)
            .context(format!("kernel {}", kernel.name))
            .into()),
    }
}
