//! Amaxes and the scales made from them.

use super::gpu::{Gpu, with_pointers};
use super::kernels::{Arg, Kernel, Shape, args, kernels};
use super::launch::launch;
use crate::base::data::scales::{CurrentScale, ScalePolicy};
use crate::base::error::{Result, internal};
use candle_core::{DType, Tensor};
use fp8_core::{Format, ScaleGrid};

kernels! { AMAX_KERNELS in AMAX;
    AMAX_TENSOR = floats "fp8_amax_tensor"("ppl");
    AMAX_ROWS = floats "fp8_amax_rows"("ppll");
    AMAX_COLS = floats "fp8_amax_cols"("ppllii");
    AMAX_GROUPS = floats "fp8_amax_groups"("ppli");
    AMAX_BLOCKS = floats "fp8_amax_blocks"("ppiiiiil");
}

kernels! { SCALE_KERNELS in SCALES;
    RECIPROCAL = one "fp8_reciprocal"("ppl");
    QUANT_SCALE = one "fp8_quant_scale"("ppplfifi");
    E8M0_TILES = one "fp8_e8m0_tiles"("ppll");
}

/// Rows per block of a column reduction. A thread has eight loads of 16 bytes in flight, a block of 64 threads 8 KiB; some 40 KiB
/// on each multiprocessor keep the memory busy, which a matrix of 8192 x 4096 bf16 reaches with runs of this length.
pub(super) const ROWS_PER_BLOCK: usize = 64;

/// f64 values are rounded to f32 first, as on the CPU.
pub(super) fn in_f32(x: &Tensor) -> Result<Tensor> {
    match x.dtype() {
        DType::F64 => Ok(x.to_dtype(DType::F32)?),
        _ => Ok(x.clone()),
    }
}

/// How the scales of a grid cover its matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scales {
    One,
    PerRow,
    PerCol,
    Blocks,
}

impl Scales {
    pub(super) fn of(grid: &ScaleGrid) -> Self {
        let (rows, cols) = (grid.rows(), grid.cols());
        match (grid.scale_rows(), grid.scale_cols()) {
            (1, 1) => Self::One,
            (r, 1) if r == rows => Self::PerRow,
            (1, c) if c == cols => Self::PerCol,
            _ => Self::Blocks,
        }
    }
}

/// f32 `[scale_rows, scale_cols]`.
pub(super) fn amax(x: &Tensor, grid: &ScaleGrid) -> Result<Tensor> {
    const OP: &str = "amax";
    let x = in_f32(x)?;
    let gpu = Gpu::of(&x)?;
    let shape = (grid.scale_rows(), grid.scale_cols());
    // Blocks without elements keep 0.
    let out = gpu.zeros(DType::F32, grid.len())?;
    let (rows, cols) = (grid.rows(), grid.cols());
    if x.elem_count() == 0 || grid.len() == 0 {
        return out.into_tensor(shape);
    }
    with_pointers(&gpu, [&x], |[x_ptr]| {
        let (dtype, n) = (x.dtype(), x.elem_count());
        let (from, to) = (Arg::Ptr(x_ptr), Arg::Ptr(out.ptr()));
        let (kernel, shape, args) = match Scales::of(grid) {
            Scales::One => (
                AMAX_TENSOR.of(OP, dtype)?,
                Shape::stride(n.div_ceil(16)),
                args![a from, a to, l n].to_vec(),
            ),
            Scales::PerRow => (
                AMAX_ROWS.of(OP, dtype)?,
                Shape::blocks(rows, row_threads(cols)),
                args![a from, a to, l rows, l cols].to_vec(),
            ),
            Scales::PerCol => (
                AMAX_COLS.of(OP, dtype)?,
                column_shape(rows, cols, dtype),
                args![a from, a to, l rows, l cols, i rows_per_block(rows), i u32::MAX].to_vec(),
            ),
            Scales::Blocks => of_blocks(x_ptr, to, dtype, grid)?,
        };
        // SAFETY: x has rows * cols values, out as many as the grid has scales; both live until the stream has run this.
        unsafe { launch(&gpu, kernel, shape, &args) }
    })?;
    out.into_tensor(shape)
}

/// The launch for blocks of values: columns of a run of rows, groups of a row that neighbouring threads read, or any others.
fn of_blocks(
    x_ptr: u64,
    to: Arg,
    dtype: DType,
    grid: &ScaleGrid,
) -> Result<(&'static Kernel, Shape, Vec<Arg>)> {
    const OP: &str = "amax";
    let (rows, cols, from) = (grid.rows(), grid.cols(), Arg::Ptr(x_ptr));
    let (block_rows, block_cols) = (grid.block_rows().min(rows), grid.block_cols().min(cols));
    let pack = 16 / dtype.size_in_bytes().max(1);
    let lanes = block_cols / pack;
    if block_cols == 1 && rows.div_ceil(block_rows) <= 65535 {
        let run = block_rows as u32;
        let shape = Shape::grid(
            cols.div_ceil(pack).div_ceil(64),
            rows.div_ceil(block_rows),
            64,
        );
        let args = args![a from, a to, l rows, l cols, i run, i run];
        return Ok((AMAX_COLS.of(OP, dtype)?, shape, args.to_vec()));
    }
    if block_rows == 1
        && block_cols.is_multiple_of(pack)
        && cols.is_multiple_of(block_cols)
        && lanes.is_power_of_two()
        && lanes <= 32
        && x_ptr.is_multiple_of(16)
    {
        let shape = Shape::stride((rows * cols).div_ceil(4 * pack));
        let args = args![a from, a to, l rows * cols, i block_cols as u32];
        return Ok((AMAX_GROUPS.of(OP, dtype)?, shape, args.to_vec()));
    }
    let sizes = [rows, cols, block_rows, block_cols, grid.scale_cols()];
    if let Some(size) = sizes.into_iter().find(|&size| size >= 1 << 31) {
        internal!("blocks of a matrix with a dimension of {size}, expected below 2^31");
    }
    let mut args = vec![from, to];
    args.extend(sizes.map(|size| Arg::Int(size as u32)));
    args.push(Arg::Len(grid.len() as u64));
    let shape = Shape::blocks(grid.len(), 128);
    Ok((AMAX_BLOCKS.of(OP, dtype)?, shape, args))
}

/// Threads of a block that handles a row of `cols` values, 16 at a time.
pub(super) fn row_threads(cols: usize) -> u32 {
    (cols.div_ceil(16).next_multiple_of(32)).clamp(32, 256) as u32
}

/// Blocks of a column reduction: each thread takes a pack of columns, and `y` is the run of rows.
pub(super) fn column_shape(rows: usize, cols: usize, dtype: DType) -> Shape {
    const THREADS: usize = 64;
    let pack = 16 / dtype.size_in_bytes().max(1);
    let packs = cols.div_ceil(pack);
    let runs = rows.div_ceil(rows_per_block(rows) as usize);
    Shape::grid(packs.div_ceil(THREADS), runs, THREADS as u32)
}

/// Rows per run, so that there are at most 65535 runs; it depends only on the shape.
pub(super) fn rows_per_block(rows: usize) -> u32 {
    ROWS_PER_BLOCK.max(rows.div_ceil(65535)) as u32
}

/// quant_scale and dequant_scale of each amax.
pub(super) fn scales(
    amax: &Tensor,
    format: Format,
    current: CurrentScale,
) -> Result<(Tensor, Tensor)> {
    let gpu = Gpu::of(amax)?;
    let n = amax.elem_count();
    let quant_scale = gpu.alloc(DType::F32, n)?;
    let dequant_scale = gpu.alloc(DType::F32, n)?;
    let (policy, eps) = policy_args(current.policy);
    if n > 0 {
        with_pointers(&gpu, [amax], |[amax]| {
            let args = args![
                p amax, p quant_scale.ptr(), p dequant_scale.ptr(), l n, f format.max(), i policy,
                f eps, i current.power_of_two,
            ];
            // SAFETY: three f32 arrays of n values.
            unsafe { launch(&gpu, &QUANT_SCALE, Shape::stride(n), &args) }
        })?;
    }
    let shape = amax.shape();
    Ok((
        quant_scale.into_tensor(shape)?,
        dequant_scale.into_tensor(shape)?,
    ))
}

/// The number of a policy in the kernels, and its lower bound of the amax.
pub(super) fn policy_args(policy: ScalePolicy) -> (u32, f32) {
    match policy {
        ScalePolicy::Dynamic => (0, fp8_core::AMAX_EPSILON),
        ScalePolicy::Current { eps } => (1, eps),
        ScalePolicy::Mx => (2, 0.),
        ScalePolicy::Inference => (3, fp8_core::AMAX_EPSILON),
    }
}

/// `1 / scale` of each.
pub(super) fn reciprocal(scale: &Tensor) -> Result<Tensor> {
    let scale = scale.contiguous()?;
    let gpu = Gpu::of(&scale)?;
    let n = scale.elem_count();
    if n == 0 {
        return Ok(scale);
    }
    let out = gpu.alloc(DType::F32, n)?;
    with_pointers(&gpu, [&scale], |[scale]| {
        let args = [Arg::Ptr(scale), Arg::Ptr(out.ptr()), Arg::Len(n as u64)];
        // SAFETY: two f32 arrays of n values.
        unsafe { launch(&gpu, &RECIPROCAL, Shape::stride(n), &args) }
    })?;
    out.into_tensor(scale.shape())
}
