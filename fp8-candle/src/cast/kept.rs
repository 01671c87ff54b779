//! What a forward pass keeps of a tensor for the backward pass: its values, or E4M3 codes with a power of two as the scale of each group of
//! neighbouring features.

use crate::base::data::matrix_dims;
use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Fp8Tensor;
use crate::device::cpu::elements::{
    Element, for_dtype, tensor, with_codes, with_scales, with_slices,
};
use crate::device::{CodedRows, Codes, GroupCodes, Groups, MadeRows, Stored};
use candle_core::{DType, Device, Tensor};
use fp8_core::{Contraction, Format, Granularity, ScaleGrid};

/// Values or codes.
#[derive(Clone)]
pub(crate) enum KeptTensor {
    Exact(Tensor),
    /// With the sizes and the dtype of the values.
    Codes(Fp8Tensor, Vec<usize>, DType),
}

impl KeptTensor {
    /// Whether the values are rounded.
    pub(crate) fn rounds(&self) -> bool {
        matches!(self, Self::Codes(..))
    }

    /// The values.
    pub(crate) fn get(&self) -> Result<Tensor> {
        match self {
            Self::Exact(x) => Ok(x.clone()),
            Self::Codes(codes, dims, dtype) => {
                Ok(codes.dequantize(*dtype)?.reshape(dims.as_slice())?)
            }
        }
    }

    /// The same, with values in order.
    pub(crate) fn contiguous(self) -> Result<Self> {
        Ok(match self {
            Self::Exact(x) => Self::Exact(x.contiguous()?),
            codes => codes,
        })
    }

    pub(crate) fn dims(&self) -> &[usize] {
        match self {
            Self::Exact(x) => x.dims(),
            Self::Codes(_, dims, _) => dims,
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        match self {
            Self::Exact(x) => x.dtype(),
            Self::Codes(_, _, dtype) => *dtype,
        }
    }

    pub(crate) fn device(&self) -> &Device {
        match self {
            Self::Exact(x) => x.device(),
            Self::Codes(codes, ..) => codes.device(),
        }
    }

    /// The codes `[b, t, h, d]`, their format and the dequant_scale of each row of `d`, if the groups of `[b, t, h * d]` are whole rows.
    pub(crate) fn code_rows(&self) -> Result<Option<(Tensor, Format, Tensor)>> {
        let Self::Codes(codes, dims, _) = self else {
            return Ok(None);
        };
        let (grid, row) = (codes.grid(), dims.last().copied().unwrap_or(1).max(1));
        let group = grid.block_cols();
        if !(group.is_multiple_of(row) && grid.cols().is_multiple_of(row)) {
            return Ok(None);
        }
        let scales = codes.dequant_scale().flatten_all()?;
        let per_row = match group == row {
            true => scales,
            false => {
                let (scales, rows) = (scales.to_vec1::<f32>()?, grid.cols() / row);
                let mut per_row = Vec::with_capacity(grid.rows() * rows);
                for token in scales.chunks(grid.scale_cols().max(1)) {
                    // The last group of a token may have fewer rows.
                    let mut left = rows;
                    for scale in token {
                        let of_group = left.min(group / row);
                        per_row.extend(std::iter::repeat_n(*scale, of_group));
                        left -= of_group;
                    }
                }
                let count = per_row.len();
                tensor(per_row, count)?
            }
        };
        let codes_in_shape = codes.codes().reshape(dims.as_slice())?;
        Ok(Some((codes_in_shape, codes.format(), per_row)))
    }

    /// Calls `read` with the values, which are on the CPU and of type `T`; codes are decoded as their rows are read.
    pub(crate) fn with_rows<T: Element, Out>(
        &self,
        read: impl FnOnce(&dyn MadeRows<T>) -> Result<Out>,
    ) -> Result<Out> {
        match self {
            Self::Exact(x) => with_slices([x], |[values]: [&[T]; 1]| read(&Stored(values)))?,
            Self::Codes(coded, ..) => with_codes("dequantize", coded.codes(), |codes| {
                with_scales("dequantize", coded.dequant_scale(), |dequant_scales| {
                    read(&CodedRows {
                        codes,
                        format: coded.format(),
                        grid: &coded.grid(),
                        dequant_scales,
                    })
                })
            }),
        }
    }
}

/// Groups of `size` features, or of what is left of a row.
fn granularity(size: usize) -> Granularity {
    Granularity::Blockwise {
        rows: 1,
        cols: size,
    }
}

/// The groups of a tensor of this shape.
pub(crate) fn group_grid(dims: &[usize], size: usize) -> ScaleGrid {
    let (rows, cols) = matrix_dims(dims);
    granularity(size).grid(rows, cols, Contraction::Cols)
}

/// Bytes of codes and scales of a tensor of this shape.
pub(crate) fn bytes_of_groups(dims: &[usize], size: usize) -> usize {
    let grid = group_grid(dims, size);
    grid.rows() * grid.cols() + grid.len() * size_of::<f32>()
}

/// The codes of `x` in groups of `size` features. Their scales are powers of two, which move exponents and round nothing: casts and
/// decoding take less time than with a product for each element, and codes keep their precision.
pub(crate) fn group_codes(x: &Tensor, size: usize) -> Result<Fp8Tensor> {
    if x.device().is_cpu() {
        crate::base::simd::check()?;
        let _scope = enter(Kind::Cast);
        let grid = group_grid(x.dims(), size);
        let codes = for_dtype!("quantize", "the tensor", x.dtype(), T => {
            with_slices([x], |[x]: [&[T]; 1]| GroupCodes::of(Groups { x, grid: &grid }))
        })?;
        return made_beside(codes, x.dims(), size);
    }
    let cast = Quantizer::dynamic(Format::E4M3, granularity(size)).with_power_of_two(true);
    Ok(cast.quantize(x, Contraction::Cols)?.tensor)
}

/// [`group_codes`] of a tensor of shape `dims`, which a task made beside other work.
pub(crate) fn made_beside(made: GroupCodes, dims: &[usize], size: usize) -> Result<Fp8Tensor> {
    let scales = made.dequant_scales.len();
    Fp8Tensor::from_codes(
        Codes::row_major(tensor(made.codes, dims)?),
        dims,
        Format::E4M3,
        (granularity(size), Contraction::Cols),
        tensor(made.dequant_scales, scales)?,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The CPU's separate pass for groups makes the same codes as the quantizer.
    #[test]
    fn codes_are_those_of_the_quantizer() -> Result<()> {
        let value = |i: usize| match i {
            77 => f32::INFINITY,
            300 => f32::NAN,
            i => (i as f32 * 12.9898).sin() * ((i / 50 % 40) as f32 - 20.).exp2(),
        };
        for (dims, size) in [([3, 5, 256], 128), ([1, 70, 100], 32), ([2, 900, 96], 96)] {
            let x = Tensor::from_iter((0..dims.iter().product()).map(value), &Device::Cpu)?;
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let x = x.to_dtype(dtype)?.reshape(&dims[..])?;
                let ours = group_codes(&x, size)?;
                let cast =
                    Quantizer::dynamic(Format::E4M3, granularity(size)).with_power_of_two(true);
                let expected = cast.quantize(&x, Contraction::Cols)?.tensor;
                let codes = |x: &Fp8Tensor| x.codes().flatten_all()?.to_vec1::<u8>();
                assert_eq!(codes(&ours)?, codes(&expected)?, "{dims:?} {dtype:?}");
                let scales = |x: &Fp8Tensor| -> Result<Vec<u32>> {
                    let scales = x.dequant_scale().flatten_all()?.to_vec1::<f32>()?;
                    Ok(scales.into_iter().map(f32::to_bits).collect())
                };
                assert_eq!(scales(&ours)?, scales(&expected)?, "{dims:?} {dtype:?}");
                assert_eq!(
                    (ours.dims(), ours.grid()),
                    (expected.dims(), expected.grid())
                );
            }
        }
        Ok(())
    }
}
