//! Rotary position embedding.

use crate::base::error::Result;
use crate::device::cuda::gpu::{Buffer, Gpu, with_pointers};
use crate::device::cuda::kernels::{Shape, args, kernels};
use crate::device::cuda::launch::launch;
use candle_core::Tensor;

kernels! { KERNELS in ROPE;
    ROTATE = floats "fp8_rope"("pppplllfi");
}

/// Rotates the pairs of `x` `[b, h, t, d]` by the angles of `cos` and `sin` `[t, d / 2]`; with `back` by their negatives,
/// which is the gradient.
pub(crate) fn rotate(
    x: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
    interleaved: bool,
    back: bool,
) -> Result<Buffer> {
    const PAIRS_OF_A_THREAD: usize = 8;
    let gpu = Gpu::of(x)?;
    let n = x.elem_count();
    let y = gpu.alloc(x.dtype(), n)?;
    if n > 0 {
        let kernel = ROTATE.of("rope", x.dtype())?;
        let (b, h, t, d) = x.dims4()?;
        let shape = Shape::stride((n / 2).div_ceil(PAIRS_OF_A_THREAD));
        with_pointers(&gpu, [x, cos, sin], |[x, cos, sin]| {
            let args = args![
                p x, p cos, p sin, p y.ptr(), l (b * h * t), l t, l (d / 2),
                f if back { -1.0 } else { 1.0 }, i interleaved,
            ];
            // SAFETY: x and y are `[b * h * t, d]`, cos and sin at least `[t, d / 2]`, of the kernel's dtype.
            unsafe { launch(&gpu, kernel, shape, &args) }
        })?;
    }
    Ok(y)
}
