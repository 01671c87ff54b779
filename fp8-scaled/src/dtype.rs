//! What the data of a scaled tensor are stored as.

use candle_core::DType;
use fp8_core::Format;

/// The dtype of the data: one of candle's, or an FP8 format.
///
/// ```
/// # use candle_core::{Device, Tensor};
/// # use fp8_scaled::*;
/// let x = as_scaled(&Tensor::new(&[1f32, -4.0], &Device::Cpu)?, 2.0)?;
/// let e4m3 = ScaledDType::from(fp8_core::Format::E4M3);
/// assert_eq!(x.astype(e4m3)?.dtype(), e4m3);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScaledDType {
    /// f32, bf16, f16 or f64.
    Float(DType),
    /// Codes of a format, without a scale of their own.
    Fp8(Format),
}

impl From<DType> for ScaledDType {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F8E4M3 => Self::Fp8(Format::E4M3),
            other => Self::Float(other),
        }
    }
}

impl From<Format> for ScaledDType {
    fn from(format: Format) -> Self {
        Self::Fp8(format)
    }
}

impl std::fmt::Display for ScaledDType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Float(dtype) => f.write_str(dtype.as_str()),
            Self::Fp8(format) => std::fmt::Display::fmt(format, f),
        }
    }
}
