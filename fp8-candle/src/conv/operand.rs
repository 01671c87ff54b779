//! An operand of the products: FP8 codes with one scale, or values in high precision.

use crate::device::{GemmOutput, backend};
use crate::error::Result;
use crate::ready::Ready;
use crate::tensor::Fp8Tensor;
use candle_core::{DType, Tensor};
use fp8_core::Contraction::{self, Cols};
use fp8_core::Granularity;

/// A tensor that is multiplied.
#[derive(Clone)]
pub(super) enum Values {
    /// With one scale.
    Fp8(Fp8Tensor),
    /// In f32.
    HighPrecision(Tensor),
}

impl Values {
    /// What the GEMM multiplies, or to `emulate` it the values of the codes in f32.
    pub(super) fn new(x8: &Fp8Tensor, emulate: bool) -> Result<Self> {
        Ok(match emulate {
            true => Self::HighPrecision(x8.dequantize(DType::F32)?),
            false => Self::Fp8(x8.clone()),
        })
    }

    /// A tensor that is not cast.
    pub(super) fn high_precision(x: &Tensor) -> Result<Self> {
        let x = x.detach().to_dtype(DType::F32)?.contiguous()?;
        Ok(Self::HighPrecision(x))
    }

    /// The codes, or the values.
    pub(super) fn elements(&self) -> &Tensor {
        match self {
            Self::Fp8(x8) => x8.codes(),
            Self::HighPrecision(x) => x,
        }
    }

    /// Other elements with the same meaning.
    pub(super) fn with(&self, elements: Tensor) -> Result<Self> {
        Ok(match self {
            Self::HighPrecision(_) => Self::HighPrecision(elements),
            Self::Fp8(x8) => Self::Fp8(Fp8Tensor::from_parts(
                elements,
                x8.format(),
                Granularity::Tensorwise,
                Cols,
                x8.dequant_scale().clone(),
            )?),
        })
    }

    /// The same elements in another shape.
    pub(super) fn reshape(&self, dims: &[usize]) -> Result<Self> {
        self.with(self.elements().reshape(dims)?)
    }
}

/// `[a.kept, b.kept]` in f32, summed over a contraction of each. Both operands are FP8, or both are not.
pub(super) fn multiply(
    (a, a_contraction): (&Values, Contraction),
    (b, b_contraction): (&Values, Contraction),
    use_fast_accum: bool,
) -> Result<Tensor> {
    if let (Values::Fp8(a), Values::Fp8(b)) = (a, b) {
        let (a, b) = (a.operand(a_contraction), b.operand(b_contraction));
        let out = GemmOutput {
            dtype: DType::F32,
            bias: None,
            use_fast_accum,
        };
        let storage = backend(a.dequant_scale.device())?.gemm(&a, &b, &out)?;
        return Ready::new(storage, (a.kept(), b.kept()))?.into_tensor();
    }
    let value = |x: &Values| match x {
        Values::Fp8(x8) => x8.dequantize(DType::F32),
        Values::HighPrecision(x) => Ok(x.clone()),
    };
    let (a, b) = (value(a)?, value(b)?);
    let a = if a_contraction == Cols { a } else { a.t()? };
    let b = if b_contraction == Cols { b.t()? } else { b };
    Ok(a.matmul(&b)?)
}
