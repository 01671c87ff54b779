//! GELU, tanh approximation.

use crate::device::cuda::gpu::{Gpu, with_pointers};
use crate::device::cuda::kernels::{Arg, Shape, kernels, launch};
use crate::error::Result;
use candle_core::{Storage, Tensor};

kernels! { KERNELS in GELU;
    FORWARD = floats "fp8_gelu"("ppl");
    BACKWARD = floats "fp8_gelu_backward"("pppl");
}

/// Elements per thread.
const CHUNK: usize = 8;

/// `gelu(x)`.
pub(crate) fn forward(x: &Tensor) -> Result<Storage> {
    let (gpu, n) = (Gpu::of(x)?, x.elem_count());
    let y = gpu.alloc(x.dtype(), n)?;
    if n > 0 {
        let kernel = FORWARD.of("gelu", x.dtype())?;
        let shape = Shape::stride(&gpu, n.div_ceil(CHUNK));
        with_pointers(&gpu, [x], |[x]| {
            let args = [Arg::Ptr(x), Arg::Ptr(y.ptr()), Arg::Len(n as u64)];
            // SAFETY: x and y are n elements of the kernel's dtype.
            unsafe { launch(&gpu, kernel, shape, &args) }
        })?;
    }
    Ok(y.into_storage())
}

/// `grad * gelu'(x)`.
pub(crate) fn backward(x: &Tensor, grad: &Tensor) -> Result<Tensor> {
    let (gpu, n) = (Gpu::of(x)?, x.elem_count());
    let dx = gpu.alloc(x.dtype(), n)?;
    if n > 0 {
        let kernel = BACKWARD.of("gelu", x.dtype())?;
        let shape = Shape::stride(&gpu, n.div_ceil(CHUNK));
        with_pointers(&gpu, [x, grad], |[x, grad]| {
            let args = [
                Arg::Ptr(x),
                Arg::Ptr(grad),
                Arg::Ptr(dx.ptr()),
                Arg::Len(n as u64),
            ];
            // SAFETY: x, grad and dx are n elements of the kernel's dtype.
            unsafe { launch(&gpu, kernel, shape, &args) }
        })?;
    }
    dx.into_tensor(x.shape())
}
