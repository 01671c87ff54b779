//! An FP8 product as cuBLASLt computes it.

use candle_core::DType;
use fp8_core::Format;

/// How the scales of an operand are laid out, with cuBLASLt's numbers (some are newer than cudarc's headers).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub(super) enum ScaleMode {
    /// One f32.
    Scalar = 0,
    /// One E8M0 code per 1x32 values along the sum.
    Mx32 = 2,
    /// One f32 for each kept index.
    OuterVector = 3,
    /// One f32 per 1x128 values along the sum.
    Vector128 = 4,
    /// One f32 per 128x128 values.
    Block128 = 5,
}

impl ScaleMode {
    /// Whether scales change along the sum.
    pub(super) fn is_block(self) -> bool {
        matches!(self, Self::Mx32 | Self::Vector128 | Self::Block128)
    }
}

/// The type of an operand's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Element {
    Fp8(Format),
    /// Without scales; the scale mode is [`ScaleMode::Scalar`].
    Bf16,
}

/// An operand as cuBLASLt sees it: `[kept, contracted]`, the sum contiguous.
#[derive(Debug, Clone, Copy)]
pub(super) struct Operand {
    pub(super) codes: u64,
    pub(super) element: Element,
    pub(super) kept: usize,
    pub(super) dequant_scale: u64,
    pub(super) mode: ScaleMode,
}

/// `out [a.kept, b.kept] = a b^T`, row-major.
#[derive(Debug, Clone, Copy)]
pub(super) struct Product {
    pub(super) a: Operand,
    pub(super) b: Operand,
    pub(super) contracted: usize,
    pub(super) out: u64,
    pub(super) dtype: DType,
    /// `[b.kept]` in `dtype`, 0 for none. Added in f32 before the only rounding.
    pub(super) bias: u64,
    /// Not with block scales, which the library refuses it for.
    pub(super) fast_accum: bool,
}

/// A description of a product, for messages.
pub(super) fn describe(product: &Product) -> String {
    format!(
        "[{}, {}] {:?} x [{}, {}] {:?} -> {}, scales {:?} x {:?}",
        product.a.kept,
        product.contracted,
        product.a.element,
        product.b.kept,
        product.contracted,
        product.b.element,
        product.dtype.as_str(),
        product.a.mode,
        product.b.mode,
    )
}
