//! FP8 codes as casts write them and as GEMMs read them.

use candle_core::{DType, Tensor};
use fp8_core::{Contraction, Format, ScaleGrid};

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
    pub(crate) fn row_major(self) -> bool {
        self != Self::Transposed
    }

    /// Whether `[cols, rows]` is written.
    pub(crate) fn transposed(self) -> bool {
        self != Self::RowMajor
    }
}

/// The codes written by a cast, in at least one of the two layouts.
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

/// The codes of a GEMM operand.
#[derive(Debug, Clone, Copy)]
pub enum GemmCodes<'a> {
    /// U8, `[rows, cols]`, contiguous.
    RowMajor(&'a Tensor),
    /// U8, `[cols, rows]`, contiguous; only on devices whose [`crate::device::Backend::orientation`] requests it.
    Transposed(&'a Tensor),
    /// U8, from [`crate::device::Backend::pack`] of this device for the operand's format; for operand B only.
    Packed(&'a Tensor),
}

/// One operand of an FP8 GEMM: codes, scales, and the dimension that is summed over.
#[derive(Debug, Clone, Copy)]
pub struct GemmOperand<'a> {
    /// The codes.
    pub codes: GemmCodes<'a>,
    /// Format of the codes.
    pub format: Format,
    /// Which scale belongs to which element.
    pub grid: ScaleGrid,
    /// f32 `[scale_rows, scale_cols]`, multiplied in after decoding.
    pub dequant_scale: &'a Tensor,
    /// Whether all scales are powers of two that E8M0 holds, as those of the MX formats: some devices multiply with these.
    pub powers_of_two: bool,
    /// The dimension that the product sums over.
    pub contraction: Contraction,
}

impl GemmOperand<'_> {
    /// Size of the dimension that the result keeps.
    pub fn kept(&self) -> usize {
        sizes(&self.grid, self.contraction).0
    }

    /// Size of the dimension that is summed over.
    pub fn contracted(&self) -> usize {
        sizes(&self.grid, self.contraction).1
    }
}

/// Sizes of the dimensions that a product keeps and sums over.
pub(crate) fn sizes(grid: &ScaleGrid, contraction: Contraction) -> (usize, usize) {
    match contraction {
        Contraction::Cols => (grid.rows(), grid.cols()),
        Contraction::Rows => (grid.cols(), grid.rows()),
    }
}

/// What a GEMM does with its sums of products.
#[derive(Debug, Clone, Copy)]
pub struct GemmOutput<'a> {
    /// Dtype of the result: f32, bf16, f16 or, on the CPU, f64 (summed in f32).
    pub dtype: DType,
    /// `[kept of b]`, added in the output dtype after the scaled product.
    pub bias: Option<&'a Tensor>,
    /// Whether a device may accumulate with fewer bits than f32 (the CPU never does).
    pub use_fast_accum: bool,
}

impl<'a> GemmOutput<'a> {
    /// Sums in f32, rounded to `dtype`, without a bias.
    pub fn new(dtype: DType) -> Self {
        Self {
            dtype,
            bias: None,
            use_fast_accum: false,
        }
    }

    /// The same with another [`GemmOutput::bias`].
    pub fn with_bias(self, bias: impl Into<Option<&'a Tensor>>) -> Self {
        Self {
            bias: bias.into(),
            ..self
        }
    }

    /// The same with or without [`GemmOutput::use_fast_accum`].
    pub fn with_fast_accum(self, use_fast_accum: bool) -> Self {
        Self {
            use_fast_accum,
            ..self
        }
    }
}
