//! Casts: which kernel is used for which matrix.

use super::arena::zeroed_cell;
use super::gpu::{Buffer, Gpu, with_pointers};
use super::kernels::{Arg, FloatKernels, Shape, args, kernels};
use super::launch::launch;
use super::scales::{Scales, amax, in_f32, policy_args, row_threads, scales};
use crate::base::data::codes::{Codes, Orientation};
use crate::base::data::scales::{CurrentCast, CurrentScale};
use crate::base::error::{Result, internal};
use candle_core::{DType, Tensor};
use fp8_core::{Cast, Format, Overflow, Rounding, ScaleGrid};

kernels! { CAST_KERNELS in CAST;
    CAST_FLAT = floats "fp8_cast_flat"("ppppli");
    CAST_ROWS = floats "fp8_cast_rows"("pppppllififi");
    CAST_GROUPS = floats "fp8_cast_groups"("pppppliiififi");
    CAST_TRANSPOSE = floats "fp8_cast_transpose"("ppppplli");
    CAST_BLOCKS = floats "fp8_cast_blocks"("ppppplliiii");
    CAST_COLUMNS = floats "fp8_cast_columns"("ppppplliii");
    CAST_GENERAL = floats "fp8_cast_general"("ppppllllliiiilii");
    DIVIDE_FLAT = floats "fp8_divide_flat"("ppppli");
    DIVIDE_ROWS = floats "fp8_divide_rows"("pppppllififi");
    DIVIDE_GROUPS = floats "fp8_divide_groups"("pppppliiififi");
    DIVIDE_GENERAL = floats "fp8_divide_general"("ppppllllliiiilii");
}

/// Whether the hardware conversion computes `cast`, but for what is rare in it: the OCP formats, nearest-even, rounded once.
pub(super) fn is_plain(cast: &Cast) -> bool {
    matches!(cast.format, Format::E4M3 | Format::E5M2)
        && cast.rounding == Rounding::NearestEven
        && !cast.via_f16
}

/// Format and overflow of a plain cast, as its kernels get them.
fn target(cast: &Cast) -> Arg {
    let e5m2 = u32::from(cast.format == Format::E5M2);
    let overflows = u32::from(cast.overflow != Overflow::Saturate);
    Arg::Int(e5m2 | overflows << 1)
}

/// The cast by tiles for these scales, and the arguments that describe them. None if tiles of 16x16 do not fill the matrix, or
/// if x or scales that are read 16 bytes at a time are not aligned to them.
fn tile_cast(grid: &ScaleGrid, x_ptr: u64, scale_ptr: u64) -> Option<(FloatKernels, Vec<Arg>)> {
    let (rows, cols) = (grid.rows(), grid.cols());
    let (block_rows, block_cols) = (grid.block_rows(), grid.block_cols());
    let fits = |n: usize| n.is_multiple_of(16) && n < 1 << 31;
    if !(fits(rows) && fits(cols) && x_ptr.is_multiple_of(16)) {
        return None;
    }
    // A block may be larger than the matrix.
    let number = |n: usize, most: usize| Arg::Int(n.min(most) as u32);
    let (height, width) = (number(block_rows, rows), number(block_cols, cols));
    let pitch = Arg::Int(grid.scale_cols() as u32);
    if Scales::of(grid) == Scales::One {
        Some((CAST_TRANSPOSE, vec![]))
    } else if block_cols >= cols || block_cols.is_multiple_of(16) {
        Some((CAST_BLOCKS, vec![height, width, pitch]))
    } else if block_cols == 1
        && (block_rows >= rows || block_rows.is_multiple_of(4))
        && scale_ptr.is_multiple_of(16)
    {
        Some((CAST_COLUMNS, vec![height, pitch]))
    } else {
        None
    }
}

/// Codes of `x` times `scale`, or divided by it, and with `measure` also max |x|. Training multiplies, unless its scales are static, so only
/// casts that multiply have kernels for every layout; those that divide by many scales, or are wanted transposed, take longer.
pub(super) fn quantize(
    x: &Tensor,
    grid: &ScaleGrid,
    scale: &Tensor,
    cast: &Cast,
    orientation: Orientation,
    measure: bool,
) -> Result<(Codes, Option<Tensor>)> {
    const OP: &str = "quantize";
    let shape = x.shape();
    let x = in_f32(x)?;
    let gpu = Gpu::of(&x)?;
    let (rows, cols, n) = (grid.rows(), grid.cols(), x.elem_count());
    let amax = measure.then(|| zeroed_cell(&gpu)).transpose()?;
    if n == 0 {
        let codes = Codes {
            row_major: Some(gpu.zero_tensor(DType::U8, shape)?),
            transposed: (orientation.transposed())
                .then(|| gpu.zero_tensor(DType::U8, (cols, rows)))
                .transpose()?,
        };
        return Ok((codes, amax));
    }
    let scale = scale.contiguous()?;
    let scales = Scales::of(grid);
    // Without a measurement any tensor will do; its address is not passed on.
    let cell = amax.as_ref().unwrap_or(&scale);
    let inputs = [&x, &scale, cell];
    let codes = with_pointers(&gpu, inputs, |[x_ptr, scale_ptr, cell]| {
        let amax_ptr = Arg::Ptr(if measure { cell } else { 0 });
        let dtype = x.dtype();
        let (from, by) = (Arg::Ptr(x_ptr), Arg::Ptr(scale_ptr));
        let plain = is_plain(cast);
        // One scale and no transposed copy: the values need not be seen as a matrix.
        let flat = scales == Scales::One && !orientation.transposed();
        let tiled = (plain && !cast.divides && !flat)
            .then(|| tile_cast(grid, x_ptr, scale_ptr))
            .flatten();
        if let Some((kernels, of_scales)) = tiled {
            let wanted = |wanted: bool| wanted.then(|| gpu.alloc(DType::U8, n)).transpose();
            let row_major = wanted(orientation.row_major())?;
            let transposed = wanted(orientation.transposed())?;
            let ptr = |codes: &Option<Buffer>| codes.as_ref().map_or(0, Buffer::ptr);
            let tiles = rows.div_ceil(128) * cols.div_ceil(128);
            let mut args = args![
                a from, a by, p ptr(&row_major), p ptr(&transposed), a amax_ptr, l rows, l cols,
            ]
            .to_vec();
            args.extend(of_scales);
            args.push(target(cast));
            let blocks = Shape {
                resident: true,
                ..Shape::blocks(tiles, 256)
            };
            // SAFETY: x and the codes have rows * cols elements, there are as many scales as the grid has, and `tile_cast` has
            // checked what the kernel requires of sizes and alignment.
            unsafe { launch(&gpu, kernels.of(OP, dtype)?, blocks, &args)? };
            return Ok(Codes {
                row_major: row_major
                    .map(|codes| codes.into_tensor(shape))
                    .transpose()?,
                transposed: transposed
                    .map(|codes| codes.into_tensor((cols, rows)))
                    .transpose()?,
            });
        }
        let row_major = gpu.alloc(DType::U8, n)?;
        let to = Arg::Ptr(row_major.ptr());
        if plain && scales == Scales::One {
            let args = [from, by, to, amax_ptr, Arg::Len(n as u64), target(cast)];
            let shape = Shape::stride(n.div_ceil(16));
            let kernels = match cast.divides {
                true => DIVIDE_FLAT,
                false => CAST_FLAT,
            };
            // SAFETY: n values, n codes, one scale.
            unsafe { launch(&gpu, kernels.of(OP, dtype)?, shape, &args)? };
        } else {
            let (rounding, key) = rounding_args(cast.rounding)?;
            let args = args![
                a from, a by, a to, a amax_ptr, l n, l cols, l grid.block_rows(),
                l grid.block_cols(), l grid.scale_cols(), i cast.format as u32, i rounding,
                i cast.overflow == Overflow::Saturate, i cast.via_f16, l key.seed, i key.step,
                i key.tensor,
            ];
            let kernels = match cast.divides {
                true => DIVIDE_GENERAL,
                false => CAST_GENERAL,
            };
            // SAFETY: n values, n codes, and as many scales as the grid has, which the caller has checked.
            unsafe {
                launch(
                    &gpu,
                    kernels.of(OP, dtype)?,
                    Shape::stride(n.div_ceil(4)),
                    &args,
                )?
            };
        }
        let row_major = row_major.into_tensor(shape)?;
        let transposed = (orientation.transposed())
            .then(|| super::codes::transpose(&row_major.reshape((rows, cols))?, rows))
            .transpose()?;
        // Once the transposed copy is made from it, nothing needs the row-major one.
        let keep = orientation.row_major() || transposed.is_none();
        Ok(Codes {
            row_major: keep.then_some(row_major),
            transposed,
        })
    })?;
    Ok((codes, amax))
}

fn rounding_args(rounding: Rounding) -> Result<(u32, fp8_core::StochasticKey)> {
    let none = fp8_core::StochasticKey::default();
    Ok(match rounding {
        Rounding::NearestEven => (0, none),
        Rounding::Stochastic(key) => (1, key),
        Rounding::TowardZero => (2, none),
        Rounding::NearestAway => (3, none),
        Rounding::TowardPositive => (4, none),
        Rounding::TowardNegative => (5, none),
        other => internal!("no CUDA kernel rounds {other}"),
    })
}

/// The cast that measures amaxes and makes codes from one read, and the arguments that describe its scales: groups of up to 128 neighbouring
/// values that fill the rows, or whole rows. None for other scales.
fn cast_in_one_pass(
    grid: &ScaleGrid,
    x_ptr: u64,
    divides: bool,
) -> Option<(FloatKernels, Shape, Vec<Arg>)> {
    // Values of a thread, and groups that it takes.
    const VALUES: usize = 8;
    const AT_ONCE: usize = 2;
    let (rows, cols) = (grid.rows(), grid.cols());
    let width = grid.block_cols().min(cols);
    let whole_groups = cols.is_multiple_of(width) && width.is_multiple_of(VALUES);
    if grid.block_rows() == 1 && whole_groups && width <= 128 && x_ptr.is_multiple_of(16) {
        let (groups, lanes) = (grid.len(), (width / VALUES).next_power_of_two());
        let threads = groups.div_ceil(AT_ONCE) * lanes;
        let sizes = args![l groups, i width as u32, i lanes as u32];
        let shape = Shape::blocks(threads.div_ceil(256), 256);
        let kernels = if divides { DIVIDE_GROUPS } else { CAST_GROUPS };
        return Some((kernels, shape, sizes.to_vec()));
    }
    let shape = Shape::blocks(rows, row_threads(cols));
    let kernels = if divides { DIVIDE_ROWS } else { CAST_ROWS };
    (Scales::of(grid) == Scales::PerRow).then(|| (kernels, shape, args![l rows, l cols].to_vec()))
}

/// A cast with scales from its own amaxes: in one pass for rows and short groups of a row, otherwise in two.
pub(super) fn quantize_current(
    x: &Tensor,
    grid: &ScaleGrid,
    current: CurrentScale,
    cast: &Cast,
    orientation: Orientation,
) -> Result<CurrentCast> {
    const OP: &str = "quantize";
    if is_plain(cast) && !orientation.transposed() && x.elem_count() > 0 {
        let (shape, x) = (x.shape(), in_f32(x)?);
        let gpu = Gpu::of(&x)?;
        let scale = || gpu.alloc(DType::F32, grid.len());
        let made = with_pointers(&gpu, [&x], |[x_ptr]| {
            let Some((kernels, blocks, sizes)) = cast_in_one_pass(grid, x_ptr, cast.divides) else {
                return Ok(None);
            };
            let codes = gpu.alloc(DType::U8, x.elem_count())?;
            let [amax, quant_scale, dequant_scale] = [scale()?, scale()?, scale()?];
            let (policy, eps) = policy_args(current.policy);
            let mut args = args![
                p x_ptr, p codes.ptr(), p amax.ptr(), p quant_scale.ptr(), p dequant_scale.ptr(),
            ]
            .to_vec();
            args.extend(sizes);
            args.extend(args![
                a target(cast), f cast.format.max(), i policy, f eps, i current.power_of_two,
            ]);
            // SAFETY: as many codes as values, and three arrays of a value for each scale; `cast_in_one_pass` has checked what the kernel
            // requires of sizes and alignment.
            unsafe { launch(&gpu, kernels.of(OP, x.dtype())?, blocks, &args)? };
            Ok(Some((codes, amax, quant_scale, dequant_scale)))
        })?;
        if let Some((codes, amax, quant_scale, dequant_scale)) = made {
            let scales = (grid.scale_rows(), grid.scale_cols());
            return Ok(CurrentCast {
                codes: Codes::row_major(codes.into_tensor(shape)?),
                quant_scale: quant_scale.into_tensor(scales)?,
                dequant_scale: dequant_scale.into_tensor(scales)?,
                amax: amax.into_tensor(scales)?,
            });
        }
    }
    let amax = amax(x, grid)?;
    let (quant_scale, dequant_scale) = scales(&amax, cast.format, current)?;
    let scale = cast.applied(&quant_scale, &dequant_scale);
    let (codes, _) = quantize(x, grid, scale, cast, orientation, false)?;
    Ok(CurrentCast {
        codes,
        quant_scale,
        dequant_scale,
        amax,
    })
}
