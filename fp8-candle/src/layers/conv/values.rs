//! What a product of a convolution reads: FP8 codes with their scales, values in high precision, or images that are cast later.

use crate::base::error::Result;
use crate::cast::quantizer::Quantizer;
use crate::cast::tensor::Fp8Tensor;
use candle_core::{DType, Tensor};
use fp8_core::Contraction::Cols;
use fp8_core::Granularity;

/// A tensor that is multiplied.
#[derive(Clone)]
pub(super) enum Values {
    /// A matrix, or images with one scale.
    Fp8(Fp8Tensor),
    /// In f32.
    HighPrecision(Tensor),
    /// Images whose scales run along the sums, cast as columns.
    Uncast(Uncast),
}

impl Values {
    /// A tensor that is not cast.
    pub(super) fn high_precision(x: &Tensor) -> Result<Self> {
        let x = x.detach().to_dtype(DType::F32)?.contiguous()?;
        Ok(Self::HighPrecision(x))
    }

    /// Images, cast at once if their elements share a scale.
    pub(super) fn images(x: &Tensor, quantizer: &Quantizer) -> Result<Self> {
        match quantizer.spec.granularity {
            Granularity::Tensorwise => Ok(Self::Fp8(quantizer.quantize(x, Cols)?.tensor)),
            _ => Ok(Self::Uncast(Uncast::new(x, quantizer)?)),
        }
    }

    /// The values of the codes, in f32.
    pub(super) fn emulated(self) -> Result<Self> {
        Ok(match self {
            Self::Fp8(x8) => Self::HighPrecision(x8.dequantize(DType::F32)?),
            Self::Uncast(images) => Self::Uncast(images.emulated()),
            Self::HighPrecision(_) => self,
        })
    }

    pub(super) fn is_high_precision(&self) -> bool {
        matches!(self, Self::HighPrecision(_))
    }

    /// The codes, or the values.
    pub(super) fn elements(&self) -> &Tensor {
        match self {
            Self::Fp8(x8) => x8.codes(),
            Self::HighPrecision(x) => x,
            Self::Uncast(images) => images.values(),
        }
    }

    /// Other elements with the same meaning; of codes with one scale.
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
            Self::Uncast(images) => Self::Uncast(images.with(elements)),
        })
    }

    /// The same elements in another shape; of codes with one scale.
    pub(super) fn reshape(&self, dims: &[usize]) -> Result<Self> {
        self.with(self.elements().reshape(dims)?)
    }
}

/// Indices of a dimension that a product keeps which share a scale.
pub(super) fn kept_block(granularity: Granularity) -> usize {
    match granularity {
        Granularity::Blockwise { rows, .. } => rows.max(1),
        _ => 1,
    }
}

/// Images in high precision, and how their columns are cast.
#[derive(Clone)]
pub(super) struct Uncast {
    pub(super) x: Tensor,
    pub(super) quantizer: Quantizer,
    pub(super) emulate: bool,
}

impl Uncast {
    pub(super) fn new(x: &Tensor, quantizer: &Quantizer) -> Result<Self> {
        Ok(Self {
            x: x.detach().contiguous()?,
            quantizer: quantizer.clone(),
            emulate: false,
        })
    }

    /// Its columns as values in f32.
    pub(super) fn emulated(self) -> Self {
        Self {
            emulate: true,
            ..self
        }
    }

    pub(super) fn values(&self) -> &Tensor {
        &self.x
    }

    pub(super) fn with(&self, x: Tensor) -> Self {
        Self { x, ..self.clone() }
    }
}
