//! The one place that knows one device from another. A new backend is a folder beside `cpu/` that implements
//! [`Backend`], and one arm in [`backend`].

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;

#[cfg(feature = "cuda")]
pub use cuda::info::{CudaInfo, cuda_info};

use crate::delayed::SlotTensors;
use crate::ops::attention::Attention;
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

/// How a current scale is made from the amax of what is cast.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CurrentScale {
    /// From amax to quant_scale.
    pub policy: ScalePolicy,
    /// Floor the quant_scale to a power of two.
    pub power_of_two: bool,
}

/// Which copies of the codes a cast of a matrix `[rows, cols]` writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Orientation {
    /// `[rows, cols]`.
    RowMajor,
    /// `[cols, rows]`.
    Transposed,
    /// Both, from one read of the values.
    Both,
}

impl Orientation {
    /// Whether `[rows, cols]` is written.
    pub fn row_major(self) -> bool {
        self != Self::Transposed
    }

    /// Whether `[cols, rows]` is written.
    pub fn transposed(self) -> bool {
        self != Self::RowMajor
    }
}

/// The codes that a cast has written, at least one of the two.
#[derive(Debug, Clone)]
pub struct Codes {
    /// U8 in the shape of the values.
    pub row_major: Option<Tensor>,
    /// U8 `[cols, rows]`.
    pub transposed: Option<Tensor>,
}

impl Codes {
    /// Row-major codes only.
    pub fn row_major(codes: Tensor) -> Self {
        Self {
            row_major: Some(codes),
            transposed: None,
        }
    }
}

/// A cast with current scales.
#[derive(Debug, Clone)]
pub struct CurrentCast {
    /// The codes.
    pub codes: Codes,
    /// f32 `[scale_rows, scale_cols]`, what the values were multiplied by.
    pub quant_scale: Tensor,
    /// Its reciprocal.
    pub dequant_scale: Tensor,
    /// f32 `[scale_rows, scale_cols]`.
    pub amax: Tensor,
}

/// The codes of a GEMM operand.
#[derive(Debug, Clone, Copy)]
pub enum GemmCodes<'a> {
    /// U8, `[rows, cols]`, contiguous.
    RowMajor(&'a Tensor),
    /// U8, `[cols, rows]`, contiguous; only on devices whose [`Backend::orientation`] asks for it.
    Transposed(&'a Tensor),
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

    /// Largest finite amax recorded in each slot (0 where none), f32 `[slots]`, and how many were not finite,
    /// U32 `[slots]`.
    fn merge_amaxes(&self, slots: &[&[Tensor]], device: &Device) -> Result<(Tensor, Tensor)>;

    /// One delayed-scaling update of every slot from `amaxes`, f32 `[slots]`, by one rule, each with its format.
    /// `non_finite`, U32 `[slots]`, is added to the slots' counts.
    fn update_delayed(
        &self,
        slots: &[(&SlotTensors, Format)],
        rule: &DelayedRule,
        amaxes: &Tensor,
        non_finite: &Tensor,
    ) -> Result<Vec<SlotTensors>>;

    /// Whether [`Backend::update_delayed`] hands back the tensors of a slot that it left alone. A device whose amaxes stay
    /// with it makes new ones always.
    fn knows_unchanged_slots(&self) -> bool;

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
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Ok(&cuda::CudaBackend),
        other => Err(crate::Error::Device(other.location()).into()),
    }
}

/// Whether the differentiable building blocks have fused forms for `dtype` on `device`.
pub(crate) fn has_fused_ops(device: &Device, dtype: DType) -> bool {
    match device {
        Device::Cpu => true,
        Device::Cuda(_) => cfg!(feature = "cuda") && dtype != DType::F64,
        Device::Metal(_) => false,
    }
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

/// The attention kernels of `device`, if it has any.
pub(crate) fn fused_attention(device: &Device) -> Option<&'static dyn FusedAttention> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Some(&cuda::attention::CudaAttention),
        _ => None,
    }
}
