//! The one place that knows one device from another. A new backend is a folder beside `cpu/` that implements
//! [`Backend`], and one arm in [`backend`].

pub(crate) mod cpu;

use crate::delayed::SlotTensors;
use candle_core::{DType, Device, Result, Storage, Tensor};
use fp8_core::{Cast, Contraction, DelayedRule, Format, ScaleGrid};

/// How an amax becomes a quant_scale.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ScalePolicy {
    /// torchao: `MAX / max(amax, 1e-12)`; Inf gives 0, NaN gives NaN.
    Dynamic,
    /// Transformer Engine's current scaling with its `eps`; zero and non-finite amaxes give 1.
    Current {
        /// Lower bound of the amax.
        eps: f32,
    },
}

/// The codes of a GEMM operand.
#[derive(Debug, Clone, Copy)]
pub enum GemmCodes<'a> {
    /// U8, `[rows, cols]`, contiguous.
    RowMajor(&'a Tensor),
    /// U8, as [`Backend::pack`] of this device has made them; for operand B only.
    Packed(&'a Tensor),
}

/// One operand of an FP8 GEMM: codes, the dimension that is summed over, and what to multiply by.
#[derive(Debug, Clone, Copy)]
pub struct GemmOperand<'a> {
    /// The codes.
    pub codes: GemmCodes<'a>,
    /// Format of the codes.
    pub format: Format,
    /// Which scale belongs to which element.
    pub grid: ScaleGrid,
    /// f32 `[scale_rows, scale_cols]`, multiplies after the decode.
    pub dequant_scale: &'a Tensor,
    /// The dimension that the product sums over.
    pub contraction: Contraction,
}

impl GemmOperand<'_> {
    /// Size of the dimension that the result keeps.
    pub fn kept(&self) -> usize {
        match self.contraction {
            Contraction::Cols => self.grid.rows(),
            Contraction::Rows => self.grid.cols(),
        }
    }

    /// Size of the dimension that is summed over.
    pub fn contracted(&self) -> usize {
        match self.contraction {
            Contraction::Cols => self.grid.cols(),
            Contraction::Rows => self.grid.rows(),
        }
    }
}

/// What comes after the products of a GEMM.
#[derive(Debug, Clone, Copy)]
pub struct GemmOutput<'a> {
    /// Dtype of the result: f32, bf16, f16 or, on the CPU, f64 (summed in f32).
    pub dtype: DType,
    /// `[kept of b]`, added in the output dtype after the scaled product.
    pub bias: Option<&'a Tensor>,
    /// Whether a device may accumulate with fewer bits than f32 (the CPU never does).
    pub use_fast_accum: bool,
}

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

    /// U8 codes of `x * quant_scale`, in `x`'s shape.
    fn quantize(
        &self,
        x: &Tensor,
        grid: &ScaleGrid,
        quant_scale: &Tensor,
        cast: &Cast,
    ) -> Result<Tensor>;

    /// [`Backend::quantize`] with one scale for all, and the amax of `x` (f32 `[1]`) from the same read.
    fn quantize_with_amax(
        &self,
        x: &Tensor,
        quant_scale: &Tensor,
        cast: &Cast,
    ) -> Result<(Tensor, Tensor)>;

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

    /// Largest finite amax recorded in each slot (0 where none), f32 `[slots]`, and how many were not finite,
    /// U32 `[slots]`.
    fn merge_amaxes(&self, slots: &[&[Tensor]], device: &Device) -> Result<(Tensor, Tensor)>;

    /// One delayed-scaling update of every slot from `amaxes`, f32 `[slots]`, of one rule and format each.
    fn update_delayed(
        &self,
        slots: &[&SlotTensors],
        rules: &[(&DelayedRule, Format)],
        amaxes: &Tensor,
    ) -> Result<Vec<SlotTensors>>;

    /// A hash of every bit of `x`, or None where it would need a copy to the host.
    fn fingerprint(&self, x: &Tensor) -> Result<Option<u64>>;
}

/// The backend of a device.
///
/// # Errors
/// If the device has none.
pub fn backend(device: &Device) -> Result<&'static dyn Backend> {
    match device {
        Device::Cpu => Ok(&cpu::CpuBackend),
        other => Err(crate::Error::Device(other.location()).into()),
    }
}

/// Whether the differentiable building blocks have fused forms on `device`.
pub(crate) fn has_fused_ops(device: &Device) -> bool {
    device.is_cpu()
}
