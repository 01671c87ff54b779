//! After a product: scales, bias, rounding; and the sums over rows for the gradient of a bias.

use super::gpu::{Buffer, Gpu, with_pointers};
use super::kernels::{Shape, args, kernels};
use super::launch::launch;
use super::scales::{column_shape, in_f32, rows_per_block};
use crate::base::data::codes::GemmOutput;
use crate::base::error::Result;
use candle_core::{DType, Storage, Tensor};

kernels! { EPILOGUE_KERNELS in EPILOGUE;
    SCALE_PRODUCT = floats "fp8_scale_product"("ppppplllii");
    ADD_BIAS = floats "fp8_add_bias"("ppll");
    SUM_ROWS = floats "fp8_sum_rows"("pplli");
    SUM_PARTIALS = floats "fp8_sum_partials"("ppll");
}

const OP: &str = "fp8 gemm";

/// `y += bias` over rows of the bias's length.
pub(super) fn add_bias(
    gpu: &Gpu,
    y: &Buffer,
    len: usize,
    dtype: DType,
    bias: &Tensor,
) -> Result<()> {
    with_pointers(gpu, [bias], |[bias_ptr]| {
        let args = args![p y.ptr(), p bias_ptr, l len, l bias.elem_count()];
        let shape = Shape::stride(len.div_ceil(8));
        // SAFETY: y has len values, in rows as long as the bias.
        unsafe { launch(gpu, ADD_BIAS.of(OP, dtype)?, shape, &args) }
    })
}

/// `round(sums * row_scale * col_scale)`, then the bias. `sums` has `m` rows of `pitch` values, of which `n` are used.
pub(super) fn scale_product(
    gpu: &Gpu,
    sums: &Tensor,
    (by_row, per_row): (&Tensor, bool),
    (by_col, per_col): (&Tensor, bool),
    (m, n, pitch): (usize, usize, usize),
    out: &GemmOutput<'_>,
) -> Result<Storage> {
    let y = gpu.alloc(out.dtype, m * n)?;
    // Without a bias any tensor will do; its address is not passed on.
    let bias = match out.bias {
        Some(bias) => bias.contiguous()?,
        None => by_row.clone(),
    };
    with_pointers(
        gpu,
        [sums, by_row, by_col, &bias],
        |[sums, by_row, by_col, bias]| {
            let args = args![
                p sums, p by_row, p by_col, p if out.bias.is_some() { bias } else { 0 }, p y.ptr(),
                l m, l n, l pitch, i per_row, i per_col,
            ];
            let shape = Shape::stride((m * n).div_ceil(4));
            // SAFETY: sums has m rows of `pitch` values, y m * n; scales are one or one per row and column; the bias has n.
            unsafe { launch(gpu, SCALE_PRODUCT.of(OP, out.dtype)?, shape, &args) }
        },
    )?;
    Ok(y.into_storage())
}

/// Sum over the rows of `[rows, cols]` in f32, as `dtype`. The order of the sums depends only on the shape.
pub(super) fn sum_rows(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let (rows, cols) = x.dims2()?;
    let x = in_f32(&x.contiguous()?)?;
    let gpu = Gpu::of(&x)?;
    if rows * cols == 0 {
        return gpu.zero_tensor(dtype, cols);
    }
    let run = rows_per_block(rows);
    let parts = rows.div_ceil(run as usize);
    let partial = gpu.alloc(DType::F32, parts * cols)?;
    with_pointers(&gpu, [&x], |[x_ptr]| {
        let args = args![p x_ptr, p partial.ptr(), l rows, l cols, i run];
        let shape = column_shape(rows, cols, x.dtype());
        // SAFETY: rows * cols values; a row of partial sums for each run of rows.
        unsafe { launch(&gpu, SUM_ROWS.of("sum_rows", x.dtype())?, shape, &args) }
    })?;
    sum_partials(&gpu, &partial, (parts, cols), dtype)
}

/// `[cols]`, the sums over the rows of `partial`, f32 `[parts, cols]`, in an order that depends only on the shape.
pub(super) fn sum_partials(
    gpu: &Gpu,
    partial: &Buffer,
    (parts, cols): (usize, usize),
    dtype: DType,
) -> Result<Tensor> {
    const COLS: usize = 32;
    const THREADS: u32 = 256;
    let narrow = match dtype {
        DType::F64 => DType::F32,
        dtype => dtype,
    };
    let out = gpu.alloc(narrow, cols)?;
    let args = args![p partial.ptr(), p out.ptr(), l parts, l cols];
    let shape = Shape::blocks(cols.div_ceil(COLS), THREADS);
    // SAFETY: parts rows of cols partial sums, cols results; a block of 8 warps for 32 columns.
    unsafe { launch(gpu, SUM_PARTIALS.of("sum_rows", narrow)?, shape, &args)? };
    Ok(out.into_tensor(cols)?.to_dtype(dtype)?)
}
