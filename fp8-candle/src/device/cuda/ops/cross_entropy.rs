//! Cross entropy with targets on the device.

use super::by_rows;
use crate::base::error::{Result, internal};
use crate::device::cuda::gpu::{Gpu, with_pointers};
use crate::device::cuda::kernels::{Arg, Shape, args, kernels};
use crate::device::cuda::launch::launch;
use candle_core::{D, DType, Storage, Tensor};

kernels! { KERNELS in CROSS_ENTROPY;
    FORWARD = floats "fp8_cross_entropy"("ppppllilii");
    MEAN = one "fp8_cross_entropy_mean"("pppplili");
    BACKWARD = floats "fp8_cross_entropy_backward"("ppppppllilii");
    TO_I64 = one "fp8_targets_to_i64"("ppli");
}

const OP: &str = "cross_entropy";

/// Contiguous targets of any integer dtype, and the value that marks ignored positions.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Targets<'a> {
    pub(crate) values: &'a Tensor,
    pub(crate) ignore_index: Option<i64>,
}

/// What the backward pass needs from the forward pass.
#[derive(Debug, Clone)]
pub(crate) struct Saved {
    /// Largest logit and reciprocal sum of exponentials of each position, f32 `[positions, 2]`.
    sums: Tensor,
    /// How many positions are not ignored, f32 `[1]`.
    counted: Tensor,
}

impl Targets<'_> {
    /// Dtype, ignored value, and whether there is one, as kernel arguments.
    fn args(&self) -> Result<[Arg; 3]> {
        Ok([
            Arg::Int(dtype_index(self.values.dtype())?),
            // The bits of the i64.
            Arg::Len(self.ignore_index.unwrap_or(0) as u64),
            Arg::Int(u32::from(self.ignore_index.is_some())),
        ])
    }
}

/// The number of an integer dtype in the kernels.
fn dtype_index(dtype: DType) -> Result<u32> {
    Ok(match dtype {
        DType::U8 => 0,
        DType::U32 => 1,
        DType::I16 => 2,
        DType::I32 => 3,
        DType::I64 => 4,
        got => internal!("{OP}: targets are integers, got {got:?}"),
    })
}

/// The mean loss, a scalar of f32.
pub(crate) fn forward(logits: &Tensor, targets: Targets<'_>) -> Result<(Storage, Saved)> {
    let gpu = Gpu::of(logits)?;
    let (rows, classes) = (targets.values.elem_count(), logits.dim(D::Minus1)?);
    let losses = gpu.alloc(DType::F32, rows)?;
    let sums = gpu.alloc(DType::F32, rows * 2)?;
    let (loss, counted) = (gpu.alloc(DType::F32, 1)?, gpu.alloc(DType::F32, 1)?);
    let [kind, ignored, some_ignored] = targets.args()?;
    with_pointers(&gpu, [logits, targets.values], |[logits_ptr, targets]| {
        if rows > 0 {
            let kernel = FORWARD.of(OP, logits.dtype())?;
            let (shape, by_warp) = by_rows(rows, classes);
            let args = args![
                p logits_ptr, p targets, p losses.ptr(), p sums.ptr(), l rows, l classes, a kind,
                a ignored, a some_ignored, a by_warp,
            ];
            // SAFETY: logits are `[rows, classes]` of the kernel's dtype, targets `[rows]` of the dtype that `kind`
            // names, losses `[rows]` and sums `[rows, 2]` of f32. A target is used as an index only if it is a class.
            unsafe { launch(&gpu, kernel, shape, &args) }?;
        }
        let args = args![
            p losses.ptr(), p targets, p loss.ptr(), p counted.ptr(), l rows, a kind, a ignored,
            a some_ignored,
        ];
        // SAFETY: losses and targets are as above, and read in the order of the stream; loss and counted are one f32.
        unsafe { launch(&gpu, &MEAN, Shape::blocks(1, 1024), &args) }
    })?;
    let saved = Saved {
        sums: sums.into_tensor((rows, 2))?,
        counted: counted.into_tensor(1)?,
    };
    Ok((loss.into_storage(), saved))
}

/// `(softmax(logits) - one_hot(targets)) * grad / counted`; `grad` is a scalar of f32.
pub(crate) fn backward(
    logits: &Tensor,
    targets: Targets<'_>,
    saved: &Saved,
    grad: &Tensor,
) -> Result<Tensor> {
    let gpu = Gpu::of(logits)?;
    let (rows, classes) = (targets.values.elem_count(), logits.dim(D::Minus1)?);
    let dx = gpu.alloc(logits.dtype(), logits.elem_count())?;
    if logits.elem_count() > 0 {
        let kernel = BACKWARD.of(OP, logits.dtype())?;
        let (shape, by_warp) = by_rows(rows, classes);
        let [kind, ignored, some_ignored] = targets.args()?;
        let tensors = [logits, targets.values, &saved.sums, &saved.counted, grad];
        with_pointers(&gpu, tensors, |[logits, targets, sums, counted, grad]| {
            let args = args![
                p logits, p targets, p sums, p counted, p grad, p dx.ptr(), l rows, l classes,
                a kind, a ignored, a some_ignored, a by_warp,
            ];
            // SAFETY: logits and dx are `[rows, classes]` of the kernel's dtype, targets `[rows]` of the dtype that
            // `kind` names, the saved tensors those of the forward pass, and grad is one f32.
            unsafe { launch(&gpu, kernel, shape, &args) }
        })?;
    }
    dx.into_tensor(logits.shape())
}

/// Contiguous targets of any integer dtype as i64; on CUDA candle cannot cast i16 and i32.
pub(crate) fn to_i64(targets: &Tensor) -> Result<Tensor> {
    let (gpu, n) = (Gpu::of(targets)?, targets.elem_count());
    let out = gpu.alloc(DType::I64, n)?;
    if n > 0 {
        let kind = Arg::Int(dtype_index(targets.dtype())?);
        with_pointers(&gpu, [targets], |[targets]| {
            let args = args![p targets, p out.ptr(), l n, a kind];
            // SAFETY: targets are n integers of the dtype that `kind` names, out has room for n of i64.
            unsafe { launch(&gpu, &TO_I64, Shape::stride(n), &args) }
        })?;
    }
    out.into_tensor(targets.shape())
}
