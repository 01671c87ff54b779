//! LayerNorm and RMSNorm.

use super::by_rows;
use crate::base::error::Result;
use crate::device::cuda::gpu::{Buffer, Gpu, with_pointer_list, with_pointers};
use crate::device::cuda::kernels::{Arg, Shape, args, kernels};
use crate::device::cuda::launch::launch;
use candle_core::{DType, Storage, Tensor};

kernels! { KERNELS in NORM;
    FORWARD = floats "fp8_norm"("pppppllfii");
    BACKWARD = floats "fp8_norm_backward"("pppppllii");
    SLABS = floats "fp8_norm_slabs"("ppppllli");
    PARAMETERS = floats "fp8_norm_parameters"("pppll");
}

/// LayerNorm (`center`) or RMSNorm over the last dimension.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Norm {
    pub(crate) op: &'static str,
    pub(crate) center: bool,
    pub(crate) eps: f64,
}

impl Norm {
    /// The result, and with `keep` what [`Norm::backward`] needs: mean and reciprocal standard deviation of each row, f32
    /// `[rows, 2]`.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        keep: bool,
    ) -> Result<(Storage, Option<Tensor>)> {
        let gpu = Gpu::of(x)?;
        let (rows, _) = matrix(x, weight);
        let y = gpu.alloc(x.dtype(), x.elem_count())?;
        let statistics = keep.then(|| gpu.alloc(DType::F32, rows * 2)).transpose()?;
        self.run(&gpu, (x, weight, bias), [Some(&y), statistics.as_ref()])?;
        let statistics = statistics.map(|statistics| statistics.into_tensor((rows, 2)));
        Ok((y.into_storage(), statistics.transpose()?))
    }

    /// The statistics alone.
    pub(crate) fn statistics(&self, x: &Tensor, weight: &Tensor) -> Result<Tensor> {
        let gpu = Gpu::of(x)?;
        let (rows, _) = matrix(x, weight);
        let statistics = gpu.alloc(DType::F32, rows * 2)?;
        self.run(&gpu, (x, weight, None), [None, Some(&statistics)])?;
        statistics.into_tensor((rows, 2))
    }

    /// `outputs`: result and statistics, each if it is wanted.
    fn run(
        &self,
        gpu: &Gpu,
        (x, weight, bias): (&Tensor, &Tensor, Option<&Tensor>),
        outputs: [Option<&Buffer>; 2],
    ) -> Result<()> {
        let (rows, cols) = matrix(x, weight);
        if rows == 0 {
            return Ok(());
        }
        let kernel = FORWARD.of(self.op, x.dtype())?;
        let (shape, by_warp) = by_rows(rows, cols);
        let tensors: Vec<&Tensor> = [x, weight].into_iter().chain(bias).collect();
        let [y, statistics] = outputs.map(|output| Arg::Ptr(output.map_or(0, Buffer::ptr)));
        with_pointer_list(gpu, &tensors, |pointers| {
            let args = args![
                p pointers[0], p pointers[1], p pointers.get(2).copied().unwrap_or(0), a y,
                a statistics, l rows, l cols, f self.eps as f32, i self.center, a by_warp,
            ];
            // SAFETY: x and y are `[rows, cols]`, weight and bias (or null) `[cols]`, of the kernel's dtype; statistics are
            // `[rows, 2]` of f32 in a new allocation, or null.
            unsafe { launch(gpu, kernel, shape, &args) }
        })
    }

    /// The gradient of x.
    pub(crate) fn backward(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        statistics: &Tensor,
    ) -> Result<Tensor> {
        let gpu = Gpu::of(x)?;
        let (rows, cols) = matrix(x, weight);
        let dx = gpu.alloc(x.dtype(), x.elem_count())?;
        if rows > 0 {
            let kernel = BACKWARD.of(self.op, x.dtype())?;
            let (shape, by_warp) = by_rows(rows, cols);
            let tensors = [x, weight, grad, statistics];
            with_pointers(&gpu, tensors, |[x, weight, grad, statistics]| {
                let args = args![
                    p x, p weight, p grad, p statistics, p dx.ptr(), l rows, l cols, i self.center,
                    a by_warp,
                ];
                // SAFETY: x, grad and dx are `[rows, cols]`, weight is `[cols]`, of the kernel's dtype; statistics are
                // those of the forward pass.
                unsafe { launch(&gpu, kernel, shape, &args) }
            })?;
        }
        dx.into_tensor(x.shape())
    }

    /// The gradients of weight and, with `with_bias`, of bias.
    pub(crate) fn parameter_gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        grad: &Tensor,
        statistics: &Tensor,
        with_bias: bool,
    ) -> Result<(Tensor, Option<Tensor>)> {
        const SLAB_COLS: usize = 256;
        const SUM_COLS: usize = 32;
        const THREADS: u32 = 256;
        let gpu = Gpu::of(x)?;
        let (rows, cols) = matrix(x, weight);
        if rows == 0 {
            let zeros = || gpu.zeros(x.dtype(), cols)?.into_tensor(cols);
            return Ok((zeros()?, with_bias.then(zeros).transpose()?));
        }
        let slab_rows = slab_rows(rows);
        let slabs = rows.div_ceil(slab_rows);
        let outputs = 1 + usize::from(with_bias);
        let partial = gpu.alloc(DType::F32, outputs * slabs * cols)?;
        with_pointers(&gpu, [x, grad, statistics], |[x_ptr, grad, statistics]| {
            let kernel = SLABS.of(self.op, x.dtype())?;
            let shape = Shape::grid(cols.div_ceil(SLAB_COLS), slabs, THREADS);
            let args = args![
                p x_ptr, p grad, p statistics, p partial.ptr(), l rows, l cols, l slab_rows,
                i with_bias,
            ];
            // SAFETY: x and grad are `[rows, cols]` of the kernel's dtype, statistics those of the forward pass, and
            // partial is `[outputs, slabs, cols]` of f32.
            unsafe { launch(&gpu, kernel, shape, &args) }
        })?;
        let dweight = gpu.alloc(x.dtype(), cols)?;
        let dbias = match with_bias {
            true => Some(gpu.alloc(x.dtype(), cols)?),
            false => None,
        };
        let kernel = PARAMETERS.of(self.op, x.dtype())?;
        let shape = Shape::grid(cols.div_ceil(SUM_COLS), outputs, THREADS);
        let args = args![
            p partial.ptr(), p dweight.ptr(), p dbias.as_ref().map_or(0, Buffer::ptr), l slabs,
            l cols,
        ];
        // SAFETY: partial is `[outputs, slabs, cols]` of f32, alive until this returns and freed in stream order; the
        // outputs are `[cols]` of the kernel's dtype, dbias is there if outputs is 2.
        unsafe { launch(&gpu, kernel, shape, &args) }?;
        let dbias = dbias.map(|dbias| dbias.into_tensor(cols));
        Ok((dweight.into_tensor(cols)?, dbias.transpose()?))
    }
}

/// Rows and columns of `x` as a matrix; no rows if a row has no elements.
fn matrix(x: &Tensor, weight: &Tensor) -> (usize, usize) {
    let cols = weight.elem_count();
    (x.elem_count().checked_div(cols).unwrap_or(0), cols)
}

/// Rows that one block sums: at most 256 slabs of 64 rows or more, depending only on the shape.
fn slab_rows(rows: usize) -> usize {
    const MAX_SLABS: usize = 256;
    const MIN_ROWS: usize = 64;
    rows.div_ceil(MAX_SLABS).max(MIN_ROWS)
}
