//! What a device supplies.

use crate::data::attention::Attention;
use crate::data::codes::{Codes, GemmOperand, GemmOutput, Orientation};
use crate::data::columns::{Columns, Recorded, RowUpdate, Updated};
use crate::data::scales::{CurrentCast, CurrentScale, ScalePolicy};
use crate::error::Result;
use candle_core::{DType, Device, Storage, Tensor};
use fp8_core::{Cast, Contraction, Format, ScaleGrid};

/// The operations every device supplies. Matrices are contiguous; sizes are checked by the callers.
pub trait Backend: Send + Sync {
    /// Largest magnitude per scale of `grid`: f32 `[scale_rows, scale_cols]`. NaN wins over everything.
    fn amax(&self, x: &Tensor, grid: &ScaleGrid) -> Result<Tensor>;

    /// quant_scale of each amax, same shape.
    fn quant_scale(
        &self,
        amax: &Tensor,
        format: Format,
        policy: ScalePolicy,
        power_of_two: bool,
    ) -> Result<Tensor>;

    /// IEEE reciprocal of each f32 scale: quant_scale to dequant_scale and back.
    fn reciprocal(&self, scale: &Tensor) -> Result<Tensor>;

    /// What this device's GEMM reads of an operand that it sums over `contraction` of; `both`: one copy of the codes serves
    /// a GEMM along either dimension, and there will be one of each.
    fn orientation(&self, contraction: Contraction, both: bool) -> Orientation;

    /// Codes of `x * quant_scale`.
    fn quantize(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        quant_scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<Codes>;

    /// [`Backend::quantize`] with one scale for all, and the amax of `x` (f32 `[1]`) from the same read.
    fn quantize_with_amax(
        &self,
        x: &Tensor,
        quant_scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<(Codes, Tensor)>;

    /// Codes of `x` under the scales that its own amaxes make.
    fn quantize_current(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        current: CurrentScale,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<CurrentCast> {
        let amax = self.amax(x, grid)?;
        let quant_scale =
            self.quant_scale(&amax, cast.format, current.policy, current.power_of_two)?;
        Ok(CurrentCast {
            codes: self.quantize(x, grid, &quant_scale, cast, orientation)?,
            dequant_scale: self.reciprocal(&quant_scale)?,
            quant_scale,
            amax,
        })
    }

    /// The transpose of U8 codes `[rows, cols]`.
    fn transpose(&self, codes: &Tensor) -> Result<Tensor>;

    /// `decode(codes) * dequant_scale` in f32, then `dtype`.
    fn dequantize(
        &self,
        codes: &Tensor,
        format: Format,
        grid: &ScaleGrid,
        dequant_scale: &Tensor,
        dtype: DType,
    ) -> Result<Tensor>;

    /// `[a.kept, b.kept]` = the scaled product of two FP8 matrices, accumulated in f32.
    fn gemm(
        &self,
        a: &GemmOperand<'_>,
        b: &GemmOperand<'_>,
        out: &GemmOutput<'_>,
    ) -> Result<Storage>;

    /// Row-major codes, U8 `[n, k]`, of a weight that a GEMM sums over k, in the form that this device reads best: U8 of one
    /// dimension, padding included. None where that form is row-major.
    fn pack(&self, codes: &Tensor) -> Result<Option<Tensor>>;

    /// The row-major codes `[n, k]` that [`Backend::pack`] was given.
    fn unpack(&self, packed: &Tensor, n: usize, k: usize) -> Result<Tensor>;

    /// Sum over the rows of `[rows, cols]`, accumulated in f32, as `dtype` `[cols]`.
    fn sum_rows(&self, x: &Tensor, dtype: DType) -> Result<Tensor>;

    /// The same bits as candle's F8E4M3.
    fn codes_to_f8e4m3(&self, codes: &Tensor) -> Result<Tensor>;

    /// The bits of candle's F8E4M3 as U8.
    fn f8e4m3_to_codes(&self, x: &Tensor) -> Result<Tensor>;

    /// Cells for the amaxes of `rows` rows, all 0.
    fn amax_cells(&self, device: &Device, rows: usize) -> Result<Box<dyn AmaxCells>>;

    /// One delayed-scaling update of all rows: `rows[i]` says how, None leaves history and scale of row i alone.
    /// `recorded.amax` of 0 leaves a row as it is unless its scale has to be remade; `recorded.non_finite` is added to
    /// the counts of every row.
    fn update_columns(
        &self,
        columns: &Columns,
        rows: &[Option<RowUpdate>],
        recorded: &Recorded,
    ) -> Result<Updated>;

    /// A hash of every bit of `x`, or None where it would need a copy to the host.
    fn fingerprint(&self, x: &Tensor) -> Result<Option<u64>>;
}

/// Running amaxes of a table's rows on its device: recording is a maximum into a cell.
///
/// Any thread may record; nothing is copied to the host.
pub trait AmaxCells: std::fmt::Debug + Send + Sync {
    /// Takes the maximum of the finite values of `amax` (f32, any shape) into the cell of `row` if `keep`, and counts one
    /// cast with Inf or NaN if there is any.
    fn record(&self, row: usize, amax: &Tensor, keep: bool) -> Result<()>;

    /// What was recorded, left where it is.
    fn read(&self) -> Result<Recorded>;

    /// What was recorded in the rows that `which` says, 0 for the others; those cells are 0 again.
    fn take(&self, which: &[bool]) -> Result<Recorded>;

    /// Puts amaxes of the first `recorded` rows back: maximum of amaxes, sum of counts.
    fn merge(&self, recorded: &Recorded) -> Result<()>;
}

/// Attention whose probabilities never reach memory.
pub(crate) trait FusedAttention: Send + Sync {
    /// Whether there are kernels for these sizes and this dtype; nothing is asked of the others.
    fn supports(&self, attention: &Attention, dtype: DType) -> bool;

    /// The result, contiguous in q's shape, and what the backward pass needs besides: log-sum-exps.
    fn forward(&self, attention: &Attention, qkv: [&Tensor; 3]) -> Result<(Storage, Tensor)>;

    /// Those gradients of q, k and v that are wanted, contiguous, from both results of the forward pass and the gradient of
    /// the first.
    fn backward(
        &self,
        attention: &Attention,
        qkv: [&Tensor; 3],
        results: (&Tensor, &Tensor),
        grad: &Tensor,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]>;
}
