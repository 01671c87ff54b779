//! The operands of FP8 products as cuBLASLt reads them: codes with the sum contiguous, scales in the order of their mode.

use super::codes::{pad, transpose};
use super::gpu::{Buffer, Gpu, aligned, with_pointers};
use super::kernels::{Arg, Shape};
use super::launch::launch;
use super::lt;
use super::product::{Element, Operand, Product, ScaleMode};
use super::scales::{E8M0_TILES, Scales};
use crate::base::data::codes::{GemmCodes, GemmOperand, GemmOutput};
use crate::base::error::{Result, shape_error};
use candle_core::{DType, Tensor};
use fp8_core::{Contraction, MX_BLOCK};

const OP: &str = "fp8 gemm";

/// How the scales of an operand are laid out in the product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    One,
    PerKept,
    /// 1x128 along the sum.
    Vector128,
    Block128,
    /// 1x32 along the sum, powers of two, where the chip multiplies with these.
    Mx,
    Other,
}

impl Kind {
    /// Whether scales do not change along the sum.
    pub(super) fn is_simple(self) -> bool {
        matches!(self, Self::One | Self::PerKept)
    }

    /// `mx`: whether the chip and the library multiply with E8M0 scales.
    pub(super) fn of(operand: &GemmOperand<'_>, mx: bool) -> Self {
        let grid = match operand.contraction {
            Contraction::Cols => operand.grid,
            Contraction::Rows => operand.grid.transpose(),
        };
        match (Scales::of(&grid), grid.block_rows(), grid.block_cols()) {
            // One block per row too: both operands of a product need scales of one kind.
            (_, 1, MX_BLOCK) if mx && operand.powers_of_two => Self::Mx,
            (Scales::One, ..) => Self::One,
            (Scales::PerRow, ..) => Self::PerKept,
            (_, 1, 128) => Self::Vector128,
            (_, 128, 128) => Self::Block128,
            _ => Self::Other,
        }
    }
}

/// Codes `[kept, contracted]` with the sum contiguous, padded with zero codes in both directions as cuBLASLt requires.
pub(super) fn along_sum(
    operand: &GemmOperand<'_>,
    kept: usize,
    contracted: usize,
) -> Result<Tensor> {
    let (rows, cols) = (operand.grid.rows(), operand.grid.cols());
    let codes = match (operand.codes, operand.contraction) {
        (GemmCodes::RowMajor(codes), Contraction::Cols) => codes.reshape((rows, cols))?,
        (GemmCodes::Transposed(codes), Contraction::Rows) => codes.reshape((cols, rows))?,
        (GemmCodes::RowMajor(codes), Contraction::Rows) => {
            transpose(&codes.reshape((rows, cols))?, contracted)?
        }
        (GemmCodes::Transposed(codes), Contraction::Cols) => {
            transpose(&codes.reshape((cols, rows))?, contracted)?
        }
        (GemmCodes::Packed(codes), _) => {
            return Err(shape_error(
                OP,
                "packed codes, which this device does not make,",
                "row-major or transposed codes",
                codes.dims(),
            ));
        }
    };
    if codes.dims() == [kept, contracted] {
        aligned(&codes)
    } else {
        pad(&codes, kept, contracted)
    }
}

/// An operand ready for cuBLASLt, with the tensors that own its memory.
pub(super) struct Ready {
    pub(super) codes: Tensor,
    pub(super) scales: Tensor,
    pub(super) kept: usize,
    pub(super) mode: ScaleMode,
    pub(super) element: Element,
}

impl Ready {
    /// `kept` as padded.
    pub(super) fn new(
        operand: &GemmOperand<'_>,
        mode: ScaleMode,
        kept: usize,
        contracted: usize,
    ) -> Result<Self> {
        Ok(Self {
            codes: along_sum(operand, kept, contracted)?,
            scales: aligned(&scales(operand, mode, kept)?)?,
            kept,
            mode,
            element: Element::Fp8(operand.format),
        })
    }

    pub(super) fn operand(&self, codes: u64, dequant_scale: u64) -> Operand {
        Operand {
            codes,
            element: self.element,
            kept: self.kept,
            dequant_scale,
            mode: self.mode,
        }
    }
}

/// dequant_scales in the order that `mode` requires.
fn scales(operand: &GemmOperand<'_>, mode: ScaleMode, kept: usize) -> Result<Tensor> {
    let scales = operand.dequant_scale;
    // Scale rows along the kept dimension.
    let by_kept = |scales: &Tensor| match operand.contraction {
        Contraction::Cols => Ok(scales.clone()),
        Contraction::Rows => scales.t(),
    };
    match mode {
        ScaleMode::Scalar => Ok(scales.contiguous()?),
        ScaleMode::OuterVector => {
            let flat = scales.flatten_all()?;
            if flat.elem_count() == 1 {
                return Ok(flat.broadcast_as(kept)?.contiguous()?);
            }
            match kept - operand.kept() {
                0 => Ok(flat.contiguous()?),
                missing => Ok(flat.pad_with_zeros(0, 0, missing)?.contiguous()?),
            }
        }
        // The kept dimension is contiguous, as the cuBLAS documentation requires for 1x128 scales.
        ScaleMode::Vector128 => {
            let scales = match Kind::of(operand, false) {
                Kind::Block128 => repeated(&by_kept(scales)?, operand.kept())?,
                _ => by_kept(scales)?,
            };
            let missing = kept - operand.kept();
            Ok(scales.pad_with_zeros(0, 0, missing)?.t()?.contiguous()?)
        }
        // The dimension of the sum is contiguous, with a stride that is a multiple of 4.
        ScaleMode::Block128 => {
            let scales = by_kept(scales)?;
            let along = scales.dim(1)?;
            let missing = along.next_multiple_of(4) - along;
            Ok(scales.pad_with_zeros(1, 0, missing)?.contiguous()?)
        }
        ScaleMode::Mx32 => e8m0_tiles(&by_kept(scales)?),
    }
}

/// Scales of squares as those of the rows in them: each row 128 times, `kept` in all.
fn repeated(scales: &Tensor, kept: usize) -> Result<Tensor> {
    let (squares, along) = scales.dims2()?;
    let rows = scales.unsqueeze(1)?.broadcast_as((squares, 128, along))?;
    Ok(rows.reshape((squares * 128, along))?.narrow(0, 0, kept)?)
}

/// `out = a b^T` by cuBLASLt. False if the library has no algorithm.
pub(super) fn product(
    gpu: &Gpu,
    a: &Ready,
    b: &Ready,
    y: &Buffer,
    out: &GemmOutput<'_>,
    bias: Option<&Tensor>,
) -> Result<bool> {
    let run = |pointers: [u64; 4], bias| {
        let [a_codes, a_scale, b_codes, b_scale] = pointers;
        let product = Product {
            a: a.operand(a_codes, a_scale),
            b: b.operand(b_codes, b_scale),
            contracted: a.codes.dim(1)?,
            out: y.ptr(),
            dtype: out.dtype,
            bias,
            fast_accum: out.use_fast_accum && !a.mode.is_block() && !b.mode.is_block(),
        };
        // SAFETY: codes are [kept, contracted], scales as their mode requires, y has a.kept * b.kept values of the dtype,
        // the bias b.kept of the same; all are on this device and live beyond the launch in stream order.
        unsafe { lt::multiply(gpu, &product) }
    };
    let operands = [&a.codes, &a.scales, &b.codes, &b.scales];
    with_pointers(gpu, operands, |pointers| match bias {
        Some(bias) => with_pointers(gpu, [bias], |[bias]| run(pointers, bias)),
        None => run(pointers, 0),
    })
}

/// The codes of f32 powers of two `[kept, blocks]` as E8M0, in tiles of 128 by 4: U8 `[tiles down, tiles across, 512]`. A scale
/// that is not a power of two becomes NaN.
///
/// Source: cuBLAS documentation, "1D block scaling factors layout".
fn e8m0_tiles(scales: &Tensor) -> Result<Tensor> {
    let (kept, blocks) = scales.dims2()?;
    let scales = scales.contiguous()?;
    let gpu = Gpu::of(&scales)?;
    let tiles = (kept.div_ceil(128), blocks.div_ceil(4));
    let len = tiles.0 * tiles.1 * 512;
    let out = gpu.alloc(DType::U8, len)?;
    if len > 0 {
        with_pointers(&gpu, [&scales], |[from]| {
            let sizes = [kept, blocks].map(|n| Arg::Len(n as u64));
            let args = [Arg::Ptr(from), Arg::Ptr(out.ptr()), sizes[0], sizes[1]];
            // SAFETY: kept * blocks scales in, a code for each place of all tiles out.
            unsafe { launch(&gpu, &E8M0_TILES, Shape::stride(len), &args) }
        })?;
    }
    out.into_tensor((tiles.0, tiles.1, 512))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fp8_core::E8M0;

    /// The place of a scale and its code, written down again from the documentation of the layout.
    fn reference(scales: &[f32], kept: usize, blocks: usize) -> Vec<u8> {
        let across = blocks.div_ceil(4);
        let mut tiles = vec![0; kept.div_ceil(128) * across * 512];
        for row in 0..kept {
            for block in 0..blocks {
                let tile = row / 128 * across + block / 4;
                let within = row % 32 * 16 + row % 128 / 32 * 4 + block % 4;
                let scale = scales[row * blocks + block];
                let code = E8M0::from_f32(scale);
                let exact = code.to_f32() == scale;
                tiles[tile * 512 + within] = if exact { code.to_bits() } else { 0xFF };
            }
        }
        tiles
    }

    #[test]
    fn powers_of_two_lie_in_tiles() -> Result<()> {
        let device = fp8_test_support::device();
        if !device.is_cuda() {
            println!("skipped: no CUDA device");
            return Ok(());
        }
        for (kept, blocks) in [(1, 1), (32, 4), (33, 5), (128, 4), (129, 3), (300, 17)] {
            // Every code, and numbers that are no code.
            let others = [0., -1., 3., f32::INFINITY, f32::NAN, 2e-39, 1.5e-39];
            let values: Vec<f32> = (0..kept * blocks)
                .map(|i| match i % 11 {
                    10 => others[i / 11 % others.len()],
                    _ => E8M0::from_bits((i * 7 % 255) as u8).to_f32(),
                })
                .collect();
            let scales = Tensor::from_slice(&values, (kept, blocks), &device)?;
            let tiles = e8m0_tiles(&scales)?.flatten_all()?.to_vec1::<u8>()?;
            assert_eq!(
                tiles,
                reference(&values, kept, blocks),
                "[{kept}, {blocks}]"
            );
        }
        Ok(())
    }
}
