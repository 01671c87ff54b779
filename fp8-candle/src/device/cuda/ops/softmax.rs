//! Softmax over the last dimension, plain and causal.

use super::by_rows;
use crate::base::error::Result;
use crate::device::cuda::gpu::{Gpu, with_pointers};
use crate::device::cuda::kernels::{args, kernels};
use crate::device::cuda::launch::launch;
use candle_core::{D, Storage, Tensor};

kernels! { KERNELS in SOFTMAX;
    FORWARD = floats "fp8_softmax"("pplllfi");
    BACKWARD = floats "fp8_softmax_backward"("ppplllfi");
}

/// `softmax(softmax_scale * x)` over the columns that each row sees; with `queries` the rows are those of causal matrices
/// `[queries, cols]`.
pub(crate) fn forward(x: &Tensor, queries: Option<usize>, softmax_scale: f64) -> Result<Storage> {
    let gpu = Gpu::of(x)?;
    let y = gpu.alloc(x.dtype(), x.elem_count())?;
    if x.elem_count() > 0 {
        let kernel = FORWARD.of("softmax", x.dtype())?;
        let cols = x.dim(D::Minus1)?;
        let rows = x.elem_count() / cols;
        let (shape, by_warp) = by_rows(rows, cols);
        with_pointers(&gpu, [x], |[x]| {
            let args = args![
                p x, p y.ptr(), l rows, l cols, l queries.unwrap_or(0), f softmax_scale as f32,
                a by_warp,
            ];
            // SAFETY: x and y are `[rows, cols]` of the kernel's dtype; rows come in whole matrices of `queries` rows,
            // at most as many as columns.
            unsafe { launch(&gpu, kernel, shape, &args) }
        })?;
    }
    Ok(y.into_storage())
}

/// `softmax_scale * y * (grad - sum(y * grad))` over the columns that each row sees.
pub(crate) fn backward(
    y: &Tensor,
    grad: &Tensor,
    queries: Option<usize>,
    softmax_scale: f64,
) -> Result<Tensor> {
    let gpu = Gpu::of(y)?;
    let dx = gpu.alloc(y.dtype(), y.elem_count())?;
    if y.elem_count() > 0 {
        let kernel = BACKWARD.of("softmax", y.dtype())?;
        let cols = y.dim(D::Minus1)?;
        let rows = y.elem_count() / cols;
        let (shape, by_warp) = by_rows(rows, cols);
        with_pointers(&gpu, [y, grad], |[y, grad]| {
            let args = args![
                p y, p grad, p dx.ptr(), l rows, l cols, l queries.unwrap_or(0),
                f softmax_scale as f32, a by_warp,
            ];
            // SAFETY: y, its gradient and dx are `[rows, cols]` of the kernel's dtype; rows come in whole matrices of
            // `queries` rows, at most as many as columns.
            unsafe { launch(&gpu, kernel, shape, &args) }
        })?;
    }
    dx.into_tensor(y.shape())
}
