//! The CPU backend: `fp8-core` casts over threads, and the GEMMs of `gemm/`.

mod attention;
mod cast;
mod dots;
pub(crate) mod elements;
mod fill;
mod gemm;
mod groups;
mod hash;
pub(crate) mod linear;
mod made;
mod pages;
mod rows;
mod scales;
mod scratch;
mod state;
mod sums;
mod unfold;

pub(crate) use attention::{CpuAttention, cached as cached_attention};
pub(crate) use fill::{filled, filled_in_pieces};
pub(crate) use groups::{GroupCodes, Groups};
pub(crate) use made::{Beside, encode_rows};
pub(crate) use rows::{CodedRows, MadeRows, Stored};
pub(crate) use scratch::Plain;

use super::backend::{AmaxCells, Backend};
use crate::base::data::codes::{Codes, GemmOperand, GemmOutput, Orientation};
use crate::base::data::columns::{Columns, Recorded, RowUpdate, Updated};
use crate::base::data::matrix_dims;
use crate::base::data::scales::{CurrentCast, CurrentScale};
use crate::base::error::Result;
use crate::base::profile::{Kind, enter};
use candle_core::{DType, Device, Storage, Tensor};
use elements::{for_dtype, tensor, with_codes, with_scales, with_slice, with_slices};
use float8::F8E4M3;
use fp8_core::{Cast, Contraction, Format, Isa, Rounding, ScaleGrid};
pub(crate) use gemm::multiplies_bf16;
use scales::{of_amaxes, reciprocals};

/// FP8 on the host.
pub(crate) struct CpuBackend;

impl Backend for CpuBackend {
    fn amax(&self, x: &Tensor, grid: &ScaleGrid) -> Result<Tensor> {
        let _scope = enter(Kind::Cast);
        let amax = for_dtype!("amax", "the tensor", x.dtype(), T => {
            with_slices([x], |[x]: [&[T]; 1]| cast::amax(x, grid))
        })?;
        tensor(amax, (grid.scale_rows(), grid.scale_cols()))
    }

    fn scales(
        &self,
        amax: &Tensor,
        format: Format,
        current: CurrentScale,
    ) -> Result<(Tensor, Tensor)> {
        let _scope = enter(Kind::Cast);
        with_scales("scales", amax, |amaxes| {
            let [mut quant, mut dequant] = [(); 2].map(|()| vec![0.; amaxes.len()]);
            of_amaxes(amaxes, format, current, &mut quant, &mut dequant);
            let shape = amax.shape();
            Ok((tensor(quant, shape)?, tensor(dequant, shape)?))
        })
    }

    fn reciprocal(&self, scale: &Tensor) -> Result<Tensor> {
        with_scales("reciprocal", scale, |scales| {
            let mut inverse = vec![0.; scales.len()];
            reciprocals(scales, &mut inverse);
            tensor(inverse, scale.shape())
        })
    }

    /// Packing transposes, so no copy is needed besides the row-major one.
    fn orientation(&self, _: Contraction, _: bool) -> Orientation {
        Orientation::RowMajor
    }

    fn quantize(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<Codes> {
        let _scope = enter(Kind::Cast);
        Ok(self.encode(x, grid, scale, cast, orientation, false)?.0)
    }

    fn quantize_with_amax(
        &self,
        x: &Tensor,
        scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<(Codes, Tensor)> {
        let _scope = enter(Kind::Cast);
        let (rows, cols) = matrix_dims(x.dims());
        let grid = ScaleGrid::tensorwise(rows, cols);
        let (codes, amax) = self.encode(x, &grid, scale, cast, orientation, true)?;
        Ok((codes, tensor(vec![amax], 1)?))
    }

    /// Blocks that lie within a row are read once.
    fn quantize_current(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        current: CurrentScale,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<CurrentCast> {
        let is_random = matches!(cast.rounding, Rounding::Stochastic(_));
        let within_runs =
            grid.scale_rows() > 1 && grid.block_rows() * grid.cols() <= cast::LONGEST_RUN;
        if is_random || !within_runs || grid.cols() == 0 {
            let amax = self.amax(x, grid)?;
            let (quant_scale, dequant_scale) = self.scales(&amax, cast.format, current)?;
            let scale = cast.applied(&quant_scale, &dequant_scale);
            return Ok(CurrentCast {
                codes: self.quantize(x, grid, scale, cast, orientation)?,
                quant_scale,
                dequant_scale,
                amax,
            });
        }
        let _scope = enter(Kind::Cast);
        let scale = |amaxes: &[f32], quant_scales: &mut [f32], dequant_scales: &mut [f32]| {
            of_amaxes(amaxes, cast.format, current, quant_scales, dequant_scales);
        };
        let made = for_dtype!("quantize", "the tensor", x.dtype(), T => {
            with_slices([x], |[x]: [&[T]; 1]| cast::encode_current(x, grid, cast, scale))
        })?;
        let shape = (grid.scale_rows(), grid.scale_cols());
        Ok(CurrentCast {
            codes: self.oriented(tensor(made.codes, x.shape())?, orientation)?,
            quant_scale: tensor(made.quant_scales, shape)?,
            dequant_scale: tensor(made.dequant_scales, shape)?,
            amax: tensor(made.amaxes, shape)?,
        })
    }

    fn transpose(&self, codes: &Tensor) -> Result<Tensor> {
        let _scope = enter(Kind::Cast);
        Ok(codes.t()?.contiguous()?)
    }

    fn dequantize(
        &self,
        codes: &Tensor,
        format: Format,
        grid: &ScaleGrid,
        dequant_scale: &Tensor,
        dtype: DType,
    ) -> Result<Tensor> {
        let _scope = enter(Kind::Cast);
        const OP: &str = "dequantize";
        with_codes(OP, codes, |values| {
            with_scales(OP, dequant_scale, |scales| {
                for_dtype!(OP, "the output", dtype, T => {
                    tensor(cast::decode::<T>(format, values, grid, scales), codes.shape())
                })
            })
        })
    }

    fn gemm(
        &self,
        a: &GemmOperand<'_>,
        b: &GemmOperand<'_>,
        out: &GemmOutput<'_>,
    ) -> Result<Storage> {
        let _scope = enter(Kind::Gemm);
        gemm::gemm(Isa::best(), a, b, out)
    }

    fn pack(&self, codes: &Tensor, format: Format) -> Result<Option<Tensor>> {
        let _scope = enter(Kind::Cast);
        let (n, k) = codes.dims2()?;
        let packed = with_codes("pack", codes, |codes| {
            Ok(gemm::pack(Isa::best(), format, codes, n, k))
        })?;
        let as_tensor = |packed: Vec<u8>| {
            let len = packed.len();
            tensor(packed, len)
        };
        packed.map(as_tensor).transpose()
    }

    fn unpack(&self, packed: &Tensor, n: usize, k: usize) -> Result<Tensor> {
        let order = gemm::packed_order(Isa::best()).unwrap_or(gemm::Order::Columns);
        let codes = with_codes("unpack", packed, |packed| {
            Ok(gemm::unpack_codes(order, packed, n, k))
        })?;
        tensor(codes, (n, k))
    }

    /// In the order of candle's own matmul backward, so that the bits equal the plain layer's.
    fn transposed_product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(b.t()?.matmul(a)?.t()?)
    }

    fn product_bf16(
        &self,
        a: (&Tensor, Contraction),
        b: (&Tensor, Contraction),
        dtype: DType,
    ) -> Result<Tensor> {
        gemm::gemm_bf16(Isa::best(), a, b, dtype)
    }

    fn sum_rows(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        let _scope = enter(Kind::Gemm);
        let cols = x.dim(1)?;
        let sums = for_dtype!("sum_rows", "the tensor", x.dtype(), T => {
            with_slices([x], |[x]: [&[T]; 1]| sums::sum_rows(x, cols))
        })?;
        sums::rounded(&sums, dtype)
    }

    fn codes_to_f8e4m3(&self, codes: &Tensor) -> Result<Tensor> {
        with_codes("codes_to_f8e4m3", codes, |values| {
            let values = values.iter().copied().map(F8E4M3::from_bits);
            tensor(values.collect::<Vec<_>>(), codes.shape())
        })
    }

    fn f8e4m3_to_codes(&self, x: &Tensor) -> Result<Tensor> {
        with_slice("f8e4m3_to_codes", "the tensor", x, |values: &[F8E4M3]| {
            let codes = values.iter().map(|value| value.to_bits());
            tensor(codes.collect::<Vec<_>>(), x.shape())
        })
    }

    fn amax_cells(&self, _: &Device, rows: usize) -> Result<Box<dyn AmaxCells>> {
        Ok(Box::new(state::CpuCells::new(rows)))
    }

    fn update_columns(
        &self,
        columns: &Columns,
        rows: &[Option<RowUpdate>],
        recorded: &Recorded,
    ) -> Result<Updated> {
        let _scope = enter(Kind::Cast);
        state::update_columns(columns, rows, recorded)
    }

    fn fingerprint(&self, x: &Tensor) -> Result<Option<u64>> {
        let _scope = enter(Kind::Cast);
        fingerprint(x).map(Some)
    }
}

/// A hash of all bits of a CPU tensor, the same on every instruction set.
pub(super) fn fingerprint(x: &Tensor) -> Result<u64> {
    for_dtype!("fingerprint", "the tensor", x.dtype(), T => {
        with_slices([x], |[x]: [&[T]; 1]| hash::fingerprint(x))
    })
}

impl CpuBackend {
    /// The codes, and with `measure` the amax of `x`.
    fn encode(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
        measure: bool,
    ) -> Result<(Codes, f32)> {
        const OP: &str = "quantize";
        let (codes, amax) = with_scales(OP, scale, |scales| {
            for_dtype!(OP, "the tensor", x.dtype(), T => with_slices([x], |[x]: [&[T]; 1]| {
                cast::encode(x, grid, scales, cast, measure)
            }))
        })?;
        Ok((self.oriented(tensor(codes, x.shape())?, orientation)?, amax))
    }

    fn oriented(&self, codes: Tensor, orientation: Orientation) -> Result<Codes> {
        let transposed = if orientation.transposed() {
            Some(self.transpose(&codes.reshape(matrix_dims(codes.dims()))?)?)
        } else {
            None
        };
        Ok(Codes {
            row_major: orientation.row_major().then_some(codes),
            transposed,
        })
    }
}
