//! The CUDA backend: our own kernels for casts, cuBLASLt for FP8 products. Everything runs on candle's stream; no scale,
//! amax or history is copied to the host.

pub(crate) mod adamw;
mod adamw_table;
pub(crate) mod adamw_tensors;
mod arena;
pub(crate) mod attention;
mod attention_args;
mod attention_fp8;
mod attention_wgmma;
mod cast;
mod chip;
mod codes;
mod constants;
mod decoded;
mod descriptors;
mod epilogue;
mod gemm;
pub(crate) mod gpu;
pub(super) mod info;
pub(crate) mod kernels;
mod launch;
mod loaded;
mod lt;
#[cfg(test)]
mod machine_code;
pub(super) mod made;
#[cfg(test)]
mod made_tests;
mod operand;
pub(crate) mod ops;
pub(super) mod paths;
mod product;
mod race;
pub(crate) mod recording;
mod scales;
mod state;
#[cfg(test)]
mod tests;
mod trial;

use super::backend::{AmaxCells, Backend};
use crate::base::data::codes::{Codes, GemmOperand, GemmOutput, Orientation};
use crate::base::data::columns::{Columns, Recorded, RowUpdate, Updated};
use crate::base::data::matrix_dims;
use crate::base::data::scales::{CurrentCast, CurrentScale};
use crate::base::error::{Result, internal};
use candle_core::{DType, Device, Storage, Tensor};
use fp8_core::{Cast, Contraction, Format, ScaleGrid};

/// FP8 on NVIDIA GPUs.
pub(crate) struct CudaBackend;

impl Backend for CudaBackend {
    fn amax(&self, x: &Tensor, grid: &ScaleGrid) -> Result<Tensor> {
        scales::amax(&x.contiguous()?, grid)
    }

    fn scales(
        &self,
        amax: &Tensor,
        format: Format,
        current: CurrentScale,
    ) -> Result<(Tensor, Tensor)> {
        scales::scales(&amax.contiguous()?, format, current)
    }

    fn reciprocal(&self, scale: &Tensor) -> Result<Tensor> {
        scales::reciprocal(scale)
    }

    /// cuBLASLt needs the sum contiguous in both operands.
    fn orientation(&self, contraction: Contraction, both: bool) -> Orientation {
        match contraction {
            _ if both => Orientation::Both,
            Contraction::Cols => Orientation::RowMajor,
            Contraction::Rows => Orientation::Transposed,
        }
    }

    fn quantize(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<Codes> {
        let x = x.contiguous()?;
        Ok(cast::quantize(&x, grid, scale, cast, orientation, false)?.0)
    }

    fn quantize_with_amax(
        &self,
        x: &Tensor,
        scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<(Codes, Tensor)> {
        let (rows, cols) = matrix_dims(x.dims());
        let grid = ScaleGrid::tensorwise(rows, cols);
        let x = x.contiguous()?;
        match cast::quantize(&x, &grid, scale, cast, orientation, true)? {
            (codes, Some(amax)) => Ok((codes, amax)),
            (_, None) => internal!("the cast has measured no amax"),
        }
    }

    fn quantize_current(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        current: CurrentScale,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<CurrentCast> {
        cast::quantize_current(&x.contiguous()?, grid, current, cast, orientation)
    }

    fn transpose(&self, codes: &Tensor) -> Result<Tensor> {
        codes::transpose(codes, codes.dim(0)?)
    }

    fn dequantize(
        &self,
        codes: &Tensor,
        format: Format,
        grid: &ScaleGrid,
        dequant_scale: &Tensor,
        dtype: DType,
    ) -> Result<Tensor> {
        codes::dequantize(codes, format, grid, dequant_scale, dtype)
    }

    fn gemm(
        &self,
        a: &GemmOperand<'_>,
        b: &GemmOperand<'_>,
        out: &GemmOutput<'_>,
    ) -> Result<Storage> {
        gemm::gemm(a, b, out)
    }

    /// Row-major codes are what cuBLASLt reads.
    fn pack(&self, _: &Tensor, _: Format) -> Result<Option<Tensor>> {
        Ok(None)
    }

    fn unpack(&self, packed: &Tensor, n: usize, k: usize) -> Result<Tensor> {
        Ok(packed.reshape((n, k))?)
    }

    fn sum_rows(&self, x: &Tensor, dtype: DType) -> Result<Tensor> {
        epilogue::sum_rows(x, dtype)
    }

    fn codes_to_f8e4m3(&self, codes: &Tensor) -> Result<Tensor> {
        codes::to_f8e4m3(codes)
    }

    fn f8e4m3_to_codes(&self, x: &Tensor) -> Result<Tensor> {
        codes::from_f8e4m3(x)
    }

    fn amax_cells(&self, device: &Device, rows: usize) -> Result<Box<dyn AmaxCells>> {
        Ok(Box::new(state::CudaCells::new(device, rows)?))
    }

    fn update_columns(
        &self,
        columns: &Columns,
        rows: &[Option<RowUpdate>],
        recorded: &Recorded,
    ) -> Result<Updated> {
        state::update_columns(columns, rows, recorded)
    }

    /// A hash on the host would need a copy.
    fn fingerprint(&self, _: &Tensor) -> Result<Option<u64>> {
        Ok(None)
    }
}
