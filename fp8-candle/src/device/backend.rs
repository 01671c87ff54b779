//! What a device has to provide.

use crate::base::data::attention::Attention;
use crate::base::data::attention_products::{BackwardOperands, Operand};
use crate::base::data::codes::{Codes, GemmOperand, GemmOutput, Orientation};
use crate::base::data::columns::{Columns, Recorded, RowUpdate, Updated};
use crate::base::data::made::{Made, MadeCast};
use crate::base::data::scales::{CurrentCast, CurrentScale};
use crate::base::error::{Result, internal};
use candle_core::{DType, Device, Storage, Tensor};
use fp8_core::{Cast, Contraction, Format, ScaleGrid};

/// The operations that every device provides. Matrices are contiguous; sizes are checked by the callers.
pub trait Backend: Send + Sync {
    /// Largest magnitude per scale of `grid`: f32 `[scale_rows, scale_cols]`. NaN counts as the largest.
    fn amax(&self, x: &Tensor, grid: &ScaleGrid) -> Result<Tensor>;

    /// quant_scale and dequant_scale of each amax, in its shape.
    fn scales(
        &self,
        amax: &Tensor,
        format: Format,
        current: CurrentScale,
    ) -> Result<(Tensor, Tensor)>;

    /// IEEE reciprocal of each f32 scale: quant_scale to dequant_scale and back.
    fn reciprocal(&self, scale: &Tensor) -> Result<Tensor>;

    /// The layout in which this device's GEMM reads an operand that it sums over `contraction`. With `both`, there will be
    /// a GEMM over either dimension, and one copy of the codes is valid for both.
    fn orientation(&self, contraction: Contraction, both: bool) -> Orientation;

    /// Codes of `x` times `scale`, or divided by it if the cast [divides](Cast::divides).
    fn quantize(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<Codes>;

    /// [`Backend::quantize`] with one scale, and the amax of `x` (f32 `[1]`) from the same read.
    fn quantize_with_amax(
        &self,
        x: &Tensor,
        scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<(Codes, Tensor)>;

    /// Codes of `x` with scales from its own amaxes.
    fn quantize_current(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        current: CurrentScale,
        cast: &Cast,
        orientation: Orientation,
    ) -> Result<CurrentCast> {
        let amax = self.amax(x, grid)?;
        let (quant_scale, dequant_scale) = self.scales(&amax, cast.format, current)?;
        let scale = cast.applied(&quant_scale, &dequant_scale);
        Ok(CurrentCast {
            codes: self.quantize(x, grid, scale, cast, orientation)?,
            quant_scale,
            dequant_scale,
            amax,
        })
    }

    /// The transpose of U8 codes `[rows, cols]`.
    fn transpose(&self, codes: &Tensor) -> Result<Tensor>;

    /// `decode(codes) * dequant_scale` in f32, then rounded to `dtype`.
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

    /// Packs row-major codes, U8 `[n, k]`, of a weight that a GEMM sums over k, in the layout that this device reads fastest:
    /// one-dimensional U8, padding included. `None` if that layout is row-major, or if its kernels do not read all of these codes of
    /// `format`: those of CPUs without bf16 units read no NaN and no infinity, and E4M3 and E5M2 alone.
    fn pack(&self, codes: &Tensor, format: Format) -> Result<Option<Tensor>>;

    /// The row-major codes `[n, k]` that [`Backend::pack`] was given.
    fn unpack(&self, packed: &Tensor, n: usize, k: usize) -> Result<Tensor>;

    /// `a^T b` `[N, K]` of floats `[M, N]` and `[M, K]`: the gradient of a weight in high precision.
    fn transposed_product(&self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        Ok(a.t()?.matmul(b)?)
    }

    /// `[a.kept, b.kept]` in `dtype` of two matrices in bf16, each with the dimension that is summed over: sums in f32, rounded once where
    /// the device can. On the CPU each row of the result has the same bits whatever the number of rows beside it.
    fn product_bf16(
        &self,
        a: (&Tensor, Contraction),
        b: (&Tensor, Contraction),
        dtype: DType,
    ) -> Result<Tensor> {
        Ok(multiply_values(a, b)?.to_dtype(dtype)?)
    }

    /// Sum over the rows of `[rows, cols]`, accumulated in f32, as `dtype` `[cols]`.
    fn sum_rows(&self, x: &Tensor, dtype: DType) -> Result<Tensor>;

    /// The bits of U8 codes as candle's F8E4M3.
    fn codes_to_f8e4m3(&self, codes: &Tensor) -> Result<Tensor>;

    /// The bits of candle's F8E4M3 as U8.
    fn f8e4m3_to_codes(&self, x: &Tensor) -> Result<Tensor>;

    /// Cells for the amaxes of `rows` rows, all 0.
    fn amax_cells(&self, device: &Device, rows: usize) -> Result<Box<dyn AmaxCells>>;

    /// One delayed-scaling update of all rows. `rows[i]` says how; `None` leaves history and scale of row i unchanged.
    /// A `recorded.amax` of 0 leaves a row unchanged unless its scale has to be remade. `recorded.non_finite` is added to
    /// the counts of every row.
    fn update_columns(
        &self,
        columns: &Columns,
        rows: &[Option<RowUpdate>],
        recorded: &Recorded,
    ) -> Result<Updated>;

    /// A hash of all bits of `x`, or `None` if it would need a copy to the host.
    fn fingerprint(&self, x: &Tensor) -> Result<Option<u64>>;
}

/// Running amaxes of a table's rows on its device: recording takes a maximum in a cell.
///
/// Any thread may record. Nothing is copied to the host.
pub trait AmaxCells: std::fmt::Debug + Send + Sync {
    /// With `keep`, merges the maximum of the finite values of `amax` (f32, any shape) into the cell of `row`. Counts one
    /// cast with Inf or NaN if there is such a value.
    fn record(&self, row: usize, amax: &Tensor, keep: bool) -> Result<()>;

    /// What was recorded; the cells keep it.
    fn read(&self) -> Result<Recorded>;

    /// What was recorded in the rows selected by `which`, 0 for the others. The selected cells are reset to 0.
    fn take(&self, which: &[bool]) -> Result<Recorded>;

    /// Merges amaxes of the first rows: maximum of amaxes, sum of counts.
    fn merge(&self, recorded: &Recorded) -> Result<()>;
}

/// Casts of values that are computed for them alone, and sums over rows beside a cast.
pub(crate) trait MadeCasts: Send + Sync {
    /// Whether there are kernels for this; the other method is not called otherwise.
    fn supports(&self, made: &Made<'_>, cast: &Cast) -> bool;

    /// Codes of `made` times the one `quant_scale`, with `measure` its amax, with `sum_rows` the sums over its rows in that dtype. The cast
    /// does not divide unless [`MadeCasts::supports`] it.
    fn cast(
        &self,
        made: &Made<'_>,
        quant_scale: &Tensor,
        cast: &Cast,
        orientation: Orientation,
        measure: bool,
        sum_rows: Option<DType>,
    ) -> Result<MadeCast>;
}

/// Attention that never stores its probabilities.
pub(crate) trait FusedAttention: Send + Sync {
    /// Whether `device` has kernels for these sizes and options, for q, k and v of `dtype`; the other methods are not called
    /// otherwise.
    fn supports(&self, attention: &Attention, dtype: DType, device: &Device) -> Result<bool>;

    /// Whether the backward pass needs the result of the forward pass.
    fn needs_result(&self) -> bool;

    /// The result in `out_dtype` (that of q, or f32), contiguous in q's shape, and the log-sum-exps, which the backward pass
    /// needs.
    fn forward(
        &self,
        attention: &Attention,
        qkv: [&Tensor; 3],
        out_dtype: DType,
    ) -> Result<(Storage, Tensor)>;

    /// The gradients of q, k and v that are `wanted`, contiguous, in the dtype of `grad`, from the gradient of the result.
    /// `results`: those of the forward pass, the first only if [`FusedAttention::needs_result`].
    fn backward(
        &self,
        attention: &Attention,
        qkv: [&Tensor; 3],
        results: (Option<&Tensor>, &Tensor),
        grad: &Tensor,
        wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]>;

    /// [`FusedAttention::forward`] with products in FP8. `dtypes`: those of q and of the result.
    fn forward_fp8(
        &self,
        attention: &Attention,
        _qkv: [Operand<'_>; 3],
        _dtypes: [DType; 2],
    ) -> Result<(Storage, Tensor)> {
        internal!("no kernels for {:?}", attention.products)
    }

    /// [`FusedAttention::backward`] with products in FP8. `dtypes`: those of q and of the gradients.
    fn backward_fp8(
        &self,
        attention: &Attention,
        _operands: BackwardOperands<'_>,
        _lse: &Tensor,
        _dtypes: [DType; 2],
        _wanted: [bool; 3],
    ) -> Result<[Option<Tensor>; 3]> {
        internal!("no kernels for {:?}", attention.products)
    }
}

/// `[a.kept, b.kept]` of two matrices in high precision.
pub(crate) fn multiply_values(
    (a, a_contraction): (&Tensor, Contraction),
    (b, b_contraction): (&Tensor, Contraction),
) -> Result<Tensor> {
    let a = match a_contraction {
        Contraction::Cols => a.clone(),
        Contraction::Rows => a.t()?,
    };
    let b = match b_contraction {
        Contraction::Cols => b.t()?,
        Contraction::Rows => b.clone(),
    };
    Ok(a.matmul(&b)?)
}
