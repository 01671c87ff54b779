//! Products of operands that the chip cannot multiply as FP8: decoded to bf16 where that is exact, otherwise to f32.

use super::codes::{dequantize, transpose};
use super::constants::constant;
use super::epilogue::scale_product;
use super::gpu::Gpu;
use super::operand::{Kind, Ready, along_sum, product};
use super::paths;
use super::product::{Element, ScaleMode};
use crate::base::data::codes::{GemmCodes, GemmOperand, GemmOutput};
use crate::base::error::Result;
use candle_core::{DType, Storage, Tensor};
use fp8_core::{Contraction, ScaleGrid};

/// Decoded to bf16 and multiplied on tensor cores with sums in f32. `None` where bf16 would round, or if the library has no
/// algorithm.
///
/// Every code is a number of bf16, whose mantissa is longer and whose exponents reach farther. So are its multiples by a power
/// of two, unless they are below 2^-126 and lose bits below 2^-133. Other scales can only be applied to the sums: if one operand has
/// blocks whose scales are not powers of two, nothing here is exact.
pub(super) fn through_bf16(
    gpu: &Gpu,
    (a, a_kind): (&GemmOperand<'_>, Kind),
    (b, b_kind): (&GemmOperand<'_>, Kind),
    out: &GemmOutput<'_>,
) -> Result<Option<Storage>> {
    let scale_after = a_kind.is_simple() && b_kind.is_simple();
    if !(scale_after || a.powers_of_two && b.powers_of_two) {
        return Ok(None);
    }
    let (m, n) = (a.kept(), b.kept());
    let one = constant(gpu, &[1f32])?;
    let values = |operand: &GemmOperand<'_>| -> Result<Ready> {
        // Rows that begin at multiples of 16 bytes; MX blocks have such lengths.
        let contracted = match scale_after {
            true => operand.contracted().next_multiple_of(8),
            false => operand.contracted(),
        };
        let kept = operand.kept();
        let codes = along_sum(operand, kept, contracted)?;
        let (grid, scales) = match (scale_after, operand.contraction) {
            (true, _) => (ScaleGrid::tensorwise(kept, contracted), one.clone()),
            (false, Contraction::Cols) => (operand.grid, operand.dequant_scale.clone()),
            (false, Contraction::Rows) => (operand.grid.transpose(), operand.dequant_scale.t()?),
        };
        Ok(Ready {
            codes: dequantize(&codes, operand.format, &grid, &scales, DType::BF16)?,
            scales: one.clone(),
            kept,
            mode: ScaleMode::Scalar,
            element: Element::Bf16,
        })
    };
    let (left, right) = (values(a)?, values(b)?);
    let sums = gpu.alloc(DType::F32, m * n)?;
    let wide = GemmOutput {
        dtype: DType::F32,
        bias: None,
        use_fast_accum: false,
    };
    if !product(gpu, &left, &right, &sums, &wide, None)? {
        return Ok(None);
    }
    paths::count(|paths| &mut paths.decoded);
    let sums = sums.into_tensor((m, n))?;
    finish(gpu, &sums, (a, a_kind), (b, b_kind), scale_after, out).map(Some)
}

/// Decoded and multiplied by candle in f32, for what tensor cores cannot compute. Scales of whole operands and of kept
/// indices are applied after the product. If one operand has other scales, both are scaled before it: large values of one
/// would overflow in products with unscaled codes of the other.
pub(super) fn dequantized(
    gpu: &Gpu,
    (a, a_kind): (&GemmOperand<'_>, Kind),
    (b, b_kind): (&GemmOperand<'_>, Kind),
    out: &GemmOutput<'_>,
) -> Result<Storage> {
    let one = constant(gpu, &[1f32])?;
    let scale_after = a_kind.is_simple() && b_kind.is_simple();
    let decode = |operand: &GemmOperand<'_>| -> Result<Tensor> {
        let (rows, cols) = (operand.grid.rows(), operand.grid.cols());
        let codes = match operand.codes {
            GemmCodes::Transposed(codes) => transpose(&codes.reshape((cols, rows))?, cols)?,
            GemmCodes::RowMajor(codes) | GemmCodes::Packed(codes) => codes.reshape((rows, cols))?,
        };
        let (grid, scales) = if scale_after {
            (ScaleGrid::tensorwise(rows, cols), &one)
        } else {
            (operand.grid, operand.dequant_scale)
        };
        dequantize(&codes, operand.format, &grid, scales, DType::F32)
    };
    let a_values = match a.contraction {
        Contraction::Cols => decode(a)?,
        Contraction::Rows => decode(a)?.t()?,
    };
    let b_values = match b.contraction {
        Contraction::Cols => decode(b)?.t()?,
        Contraction::Rows => decode(b)?,
    };
    let sums = a_values.matmul(&b_values)?;
    finish(gpu, &sums, (a, a_kind), (b, b_kind), scale_after, out)
}

/// Sums to results: scales, if they are applied after the product, bias and rounding.
fn finish(
    gpu: &Gpu,
    sums: &Tensor,
    (a, a_kind): (&GemmOperand<'_>, Kind),
    (b, b_kind): (&GemmOperand<'_>, Kind),
    scale_after: bool,
    out: &GemmOutput<'_>,
) -> Result<Storage> {
    let after = |operand: &GemmOperand<'_>| -> Result<Tensor> {
        match scale_after {
            true => Ok(operand.dequant_scale.contiguous()?),
            false => constant(gpu, &[1f32]),
        }
    };
    let scales = (after(a)?, after(b)?);
    let sizes = (a.kept(), b.kept(), b.kept());
    let per_row = (&scales.0, scale_after && a_kind == Kind::PerKept);
    let per_col = (&scales.1, scale_after && b_kind == Kind::PerKept);
    scale_product(gpu, sums, per_row, per_col, sizes, out)
}
