//! A stand-in for the rest of a model after a layer.

use candle_core::backend::BackendDevice;
#[cfg(feature = "cuda")]
use candle_core::backend::BackendStorage;
use candle_core::cpu_backend::CpuDevice;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Result, Shape, Tensor};

/// An operation with a scalar result, whose gradient for its input is the given tensor. It does not read the input, so a backward
/// pass through it takes the time of the layer alone.
pub(super) struct GradientFrom(pub(super) Tensor);

impl CustomOp1 for GradientFrom {
    fn name(&self) -> &'static str {
        "gradient-from"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        let shape = Shape::from(());
        Ok((CpuDevice.zeros_impl(&shape, self.0.dtype())?, shape))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(&self, x: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        let shape = Shape::from(());
        Ok((x.device().zeros_impl(&shape, self.0.dtype())?, shape))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Err(candle_core::Error::NotCompiledWithCudaSupport)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}
