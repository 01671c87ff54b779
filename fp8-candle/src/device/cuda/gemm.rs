//! FP8 products: how cuBLASLt computes them for each kind of scales, and the fallback.
//!
//! | scales | chip, library | way |
//! |---|---|---|
//! | one for each operand | 8.9 | cuBLASLt, scalar scales |
//! | one per kept index of an operand | 9.0, CUDA 12.9 | cuBLASLt, outer vectors |
//! | the same | 8.9 | cuBLASLt to f32 without scales, then a kernel that scales, adds the bias and rounds |
//! | 1x128, 128x128 | 9.0, CUDA 12.9 | cuBLASLt, block scales; those of 128x128 by 128x128 repeated as 1x128 for one operand |
//! | 1x32, powers of two (MX) | 10.0, CUDA 12.8 | cuBLASLt, E8M0 scales |
//! | MX elsewhere, and format pairs that the chip cannot multiply | 8.9 | decoded to bf16, which is exact, then cuBLASLt to f32 |
//! | any other | any | dequantized, then candle's f32 product |
//!
//! [`GemmPaths`](super::paths::GemmPaths) counts which way products took: the last one is 20 to 30 times slower, the one before it
//! about twice, with the right values.
//!
//! cuBLASLt multiplies a sum by the scales of one operand and then by those of the other: with more than one scale per operand, a sum
//! times one scale that exceeds f32 gives infinity, also where the other scale would bring it back.
//!
//! Rounding of a bias: cuBLASLt's epilogue adds it in f32 and rounds once. The other ways round the scaled sum to the
//! output's dtype first, as on the CPU, and then the sum with the bias, so f16 and bf16 results can differ by one unit in the
//! last place between them.

use super::constants::constant;
use super::decoded::{dequantized, through_bf16};
use super::epilogue::{add_bias, scale_product};
use super::gpu::{Buffer, Gpu, aligned};
use super::lt;
use super::operand::{Kind, Ready, along_sum, product};
use super::paths;
use super::product::{Element, ScaleMode};
use crate::base::check::narrow_error;
use crate::base::data::codes::{GemmOperand, GemmOutput};
use crate::base::data::storage::take_storage;
use crate::base::error::{Error, Result, shape_error};
use candle_core::{DType, Storage, Tensor};
use fp8_core::{Format, MX_BLOCK};

const OP: &str = "fp8 gemm";

/// cuBLASLt needs multiples of this for the dimension that is summed over and for the rows of its column-major result.
const MULTIPLE: usize = 16;

/// The version with E8M0 scales.
const MX_SCALES_VERSION: usize = 120_800;

/// The version with outer-vector and block scales.
const VECTOR_SCALES_VERSION: usize = 120_900;

/// `[a.kept, b.kept]` = the scaled product, accumulated in f32.
pub(super) fn gemm(
    a: &GemmOperand<'_>,
    b: &GemmOperand<'_>,
    out: &GemmOutput<'_>,
) -> Result<Storage> {
    let (m, n, k) = (a.kept(), b.kept(), a.contracted());
    if b.contracted() != k {
        return Err(shape_error(
            OP,
            "operand B",
            format!("{k} values to sum over, as operand A has"),
            vec![b.grid.rows(), b.grid.cols()],
        ));
    }
    let gpu = Gpu::of(a.dequant_scale)?;
    if !matches!(out.dtype, DType::F32 | DType::BF16 | DType::F16) {
        return Err(narrow_error(OP, "the output", out.dtype));
    }
    if gpu.capability() < (8, 9) {
        return Err(Error::Chip {
            op: "an FP8 product",
            needed: "compute capability 8.9",
            chip: gpu.chip_name().to_string(),
            capability: gpu.capability(),
        });
    }
    let bias = out.bias.map(|bias| bias.to_dtype(out.dtype)).transpose()?;
    let out = &GemmOutput {
        bias: bias.as_ref(),
        ..*out
    };
    if m * n == 0 || k == 0 {
        return empty(&gpu, m, n, out);
    }
    let mx_scales = gpu.capability() >= (10, 0) && lt::version() >= MX_SCALES_VERSION;
    let kinds = match (Kind::of(a, mx_scales), Kind::of(b, mx_scales)) {
        both @ (Kind::Mx, Kind::Mx) => both,
        // One block per row beside an operand of another kind: scales of rows.
        _ => (Kind::of(a, false), Kind::of(b, false)),
    };
    let simple = Kind::is_simple;
    let vector_scales = gpu.capability() == (9, 0) && lt::version() >= VECTOR_SCALES_VERSION;
    let multiplies = multiplies(a.format, b.format);
    let done = if !multiplies {
        None
    } else if kinds == (Kind::One, Kind::One) {
        direct(&gpu, (a, ScaleMode::Scalar), (b, ScaleMode::Scalar), out)?
    } else if simple(kinds.0) && simple(kinds.1) {
        let direct = if vector_scales {
            let outer = ScaleMode::OuterVector;
            direct(&gpu, (a, outer), (b, outer), out)?
        } else {
            None
        };
        match direct {
            Some(done) => Some(done),
            None => scaled_after(&gpu, (a, kinds.0), (b, kinds.1), out)?,
        }
    } else if kinds == (Kind::Mx, Kind::Mx) {
        direct(&gpu, (a, ScaleMode::Mx32), (b, ScaleMode::Mx32), out)?
    } else if let (true, Some(a_mode), Some(b_mode)) =
        (vector_scales, block_mode(kinds.0), block_mode(kinds.1))
    {
        // No library multiplies two operands with scales of squares.
        let a_mode = match (a_mode, b_mode) {
            (ScaleMode::Block128, ScaleMode::Block128) => ScaleMode::Vector128,
            _ => a_mode,
        };
        direct(&gpu, (a, a_mode), (b, b_mode), out)?
    } else {
        None
    };
    if let Some(storage) = done {
        return Ok(storage);
    }
    if let Some(storage) = through_bf16(&gpu, (a, kinds.0), (b, kinds.1), out)? {
        return Ok(storage);
    }
    paths::count(|paths| &mut paths.dequantized);
    dequantized(&gpu, (a, kinds.0), (b, kinds.1), out)
}

/// Tensor cores cannot multiply two E5M2 matrices, and have no fnuz formats.
fn multiplies(a: Format, b: Format) -> bool {
    matches!(
        (a, b),
        (Format::E4M3, Format::E4M3 | Format::E5M2) | (Format::E5M2, Format::E4M3)
    )
}

fn block_mode(kind: Kind) -> Option<ScaleMode> {
    match kind {
        Kind::Vector128 => Some(ScaleMode::Vector128),
        Kind::Block128 => Some(ScaleMode::Block128),
        _ => None,
    }
}

/// The result if there is nothing to sum: zeros, plus the bias.
fn empty(gpu: &Gpu, m: usize, n: usize, out: &GemmOutput<'_>) -> Result<Storage> {
    match out.bias {
        Some(bias) if m * n > 0 => take_storage(bias.broadcast_as((m, n))?.force_contiguous()?),
        _ => Ok(gpu.zeros(out.dtype, m * n)?.into_storage()),
    }
}

/// Through cuBLASLt, which applies the scales. `None` if it has no algorithm.
fn direct(
    gpu: &Gpu,
    (a, a_mode): (&GemmOperand<'_>, ScaleMode),
    (b, b_mode): (&GemmOperand<'_>, ScaleMode),
    out: &GemmOutput<'_>,
) -> Result<Option<Storage>> {
    let (m, n) = (a.kept(), b.kept());
    let multiple = match a_mode {
        ScaleMode::Mx32 => MX_BLOCK,
        _ => MULTIPLE,
    };
    let k = a.contracted().next_multiple_of(multiple);
    // The columns of the library's column-major result may be any number, but with block scales.
    let rows = match a_mode.is_block() {
        true => m.next_multiple_of(multiple),
        false => m,
    };
    let a = Ready::new(a, a_mode, rows, k)?;
    let b = Ready::new(b, b_mode, n.next_multiple_of(multiple), k)?;
    let whole = (rows, b.kept) == (m, n);
    let bias = out.bias.map(aligned).transpose()?;
    // In the library's epilogue, if it supports a bias of the output's dtype and there is no padding.
    let fused = bias.is_some() && out.dtype != DType::F32 && whole;
    let attempt = |fuse: bool| {
        let y = gpu.alloc(out.dtype, rows * b.kept)?;
        let bias = if fuse { bias.as_ref() } else { None };
        let done = product(gpu, &a, &b, &y, out, bias)?;
        Ok::<_, candle_core::Error>(done.then_some(y))
    };
    let (y, added) = match attempt(fused)? {
        Some(y) => (y, fused),
        None if fused => match attempt(false)? {
            Some(y) => (y, false),
            None => return Ok(None),
        },
        None => return Ok(None),
    };
    paths::count(|paths| &mut paths.direct);
    if !whole {
        return finish_padded(y, (rows, b.kept), (m, n), bias.as_ref()).map(Some);
    }
    if let (Some(bias), false) = (&bias, added) {
        add_bias(gpu, &y, m * n, out.dtype, bias)?;
    }
    Ok(Some(y.into_storage()))
}

/// The rows and columns that are not padding, and the bias.
fn finish_padded(
    y: Buffer,
    padded: (usize, usize),
    (m, n): (usize, usize),
    bias: Option<&Tensor>,
) -> Result<Storage> {
    let y = y.into_tensor(padded)?.narrow(0, 0, m)?.narrow(1, 0, n)?;
    match bias {
        Some(bias) => take_storage(y.broadcast_add(bias)?),
        None => take_storage(y.force_contiguous()?),
    }
}

/// The sums in f32 without scales, then one kernel for scales, bias and rounding. `None` if the library has no algorithm.
fn scaled_after(
    gpu: &Gpu,
    (a, a_kind): (&GemmOperand<'_>, Kind),
    (b, b_kind): (&GemmOperand<'_>, Kind),
    out: &GemmOutput<'_>,
) -> Result<Option<Storage>> {
    let (m, n) = (a.kept(), b.kept());
    let k = a.contracted().next_multiple_of(MULTIPLE);
    let one = constant(gpu, &[1f32])?;
    let unscaled = |operand: &GemmOperand<'_>, kept| -> Result<Ready> {
        Ok(Ready {
            codes: along_sum(operand, kept, k)?,
            scales: one.clone(),
            kept,
            mode: ScaleMode::Scalar,
            element: Element::Fp8(operand.format),
        })
    };
    let (left, right) = (unscaled(a, m)?, unscaled(b, n.next_multiple_of(MULTIPLE))?);
    let sums = gpu.alloc(DType::F32, m * right.kept)?;
    let wide = GemmOutput {
        dtype: DType::F32,
        bias: None,
        use_fast_accum: out.use_fast_accum,
    };
    if !product(gpu, &left, &right, &sums, &wide, None)? {
        return Ok(None);
    }
    paths::count(|paths| &mut paths.scaled_after);
    let sums = sums.into_tensor((m, right.kept))?;
    let (by_row, by_col) = (a.dequant_scale.contiguous()?, b.dequant_scale.contiguous()?);
    let sizes = (m, n, right.kept);
    let per_row = (&by_row, a_kind == Kind::PerKept);
    let per_col = (&by_col, b_kind == Kind::PerKept);
    scale_product(gpu, &sums, per_row, per_col, sizes, out).map(Some)
}
